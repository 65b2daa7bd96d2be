"""The decoder as a service: Ray Serve deployments around the engine, and the handles that the gateway holds."""
