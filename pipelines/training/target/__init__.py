"""Losses, and the training targets of decoder and student."""
