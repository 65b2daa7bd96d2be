"""Item codes deeper than 1: item embeddings, residual k-means over them, a distinct path per item, and new items."""
