"""Recommenders that were trained elsewhere: their items' codes, prompts and checkpoints."""
