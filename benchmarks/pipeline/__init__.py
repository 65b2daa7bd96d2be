"""How the offline pipeline's cost grows with the data: each stage separately, on synthetic events."""
