"""Correctness of analysis results, intervals and estimates, on data with known truth."""
