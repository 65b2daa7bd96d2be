"""Exports, precomputes and publishes a bundle."""
