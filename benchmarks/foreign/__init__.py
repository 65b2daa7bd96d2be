"""An imported recommender against its framework's own decoding."""
