"""How the offline pipeline's cost grows with the data: each stage alone, on synthetic events."""
