"""The decoder as a service: a Ray Serve deployment around the engine, and the handle that the router holds."""
