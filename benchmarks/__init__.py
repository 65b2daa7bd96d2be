"""Measurements behind every claim of speed or quality: their commands and last results."""
