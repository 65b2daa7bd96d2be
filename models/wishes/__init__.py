"""Reads wishes: short texts such as "an old comedy, nothing romantic" become scores and exclusions of items."""
