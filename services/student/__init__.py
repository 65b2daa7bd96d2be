"""The distilled ranker, in the gateway's process."""
