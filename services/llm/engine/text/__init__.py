"""Sampling of text tokens."""
