"""The ranking deployment and the handle to it."""
