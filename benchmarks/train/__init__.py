"""Training over workers: whether each layout gives the same result as one process."""
