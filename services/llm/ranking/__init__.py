"""The ranking deployment."""
