"""The load generator and code shared by the benchmarks."""
