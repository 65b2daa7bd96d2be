"""The text deployment and the handle to it."""
