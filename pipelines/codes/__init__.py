"""Item codes deeper than 1: an embedding of each item, residual k-means over it, a path of its own for each item, and new items appended."""
