"""How fast and how well the running stack answers: by tier, beyond its capacity, and under a profile of load."""
