"""The roles of the image's containers."""
