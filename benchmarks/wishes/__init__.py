"""Benchmarks of wishes."""
