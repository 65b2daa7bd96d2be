"""The live catalogue: how soon a hidden item is gone from every answer, also through faults, and what a million items cost."""
