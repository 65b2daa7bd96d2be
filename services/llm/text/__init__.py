"""The text deployment."""
