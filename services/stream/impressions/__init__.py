"""Impressions: kept in their own offline log and remembered per user.

The pure memory, and the worker that does the I/O.
"""
