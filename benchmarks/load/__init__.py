"""The load generator and what the benchmarks share."""
