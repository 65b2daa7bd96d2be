"""How cost grows with size: one axis at a time."""
