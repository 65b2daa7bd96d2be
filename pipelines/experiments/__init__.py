"""Joins impressions with clicks, tests experiments and canaries at any look, and estimates unserved policies."""
