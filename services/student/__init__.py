"""The distilled ranker, in the router's own process."""
