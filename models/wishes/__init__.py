"""Wishes: what a reader understands of a user's words, and its part in the ranking of items."""
