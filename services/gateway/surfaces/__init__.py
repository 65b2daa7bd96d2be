"""Surfaces: the places in a product, and what applies at each."""
