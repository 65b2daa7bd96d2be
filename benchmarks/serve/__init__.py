"""How fast and how well the running stack answers: by tier, and beyond its capacity."""
