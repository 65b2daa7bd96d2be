"""Fills the tables of the pages from the files in benchmarks/results."""
