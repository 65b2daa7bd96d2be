"""The tiers that can answer, and the bundle that they answer from."""
