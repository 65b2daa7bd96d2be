"""Offline features, point in time."""
