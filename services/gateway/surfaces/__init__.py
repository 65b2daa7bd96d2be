"""Surfaces: the recommendation slots of a product, with the settings of each."""
