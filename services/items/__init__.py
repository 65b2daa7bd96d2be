"""The live catalogue: the state of items, in columns by the index of the live bundle, that filters and rules read."""
