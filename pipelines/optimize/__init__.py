"""Variants of a published bundle: made by recipes, measured where they serve, and published where they win."""
