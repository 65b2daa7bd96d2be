"""Explain where the time of a training step, of a ranking or of a text went."""
