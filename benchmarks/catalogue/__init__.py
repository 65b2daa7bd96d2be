"""The live catalogue: time until a hidden item disappears from every answer, also during faults, and the cost of a million items."""
