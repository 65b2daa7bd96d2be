"""Training over workers: whether each layout learns what one process does."""
