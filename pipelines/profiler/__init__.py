"""Explains the time of a training step, a ranking or a text."""
