"""Impressions: landed in an offline log of their own, and remembered by user. The pure memory, and the worker that does the I/O."""
