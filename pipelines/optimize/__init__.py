"""Variants of a published bundle: made by recipes, measured under serving conditions, and published if they win."""
