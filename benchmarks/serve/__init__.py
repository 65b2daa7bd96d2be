"""Latency and quality of the running stack's answers: by tier, and beyond its capacity."""
