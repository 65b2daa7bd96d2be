"""The mesh of processes that fit one model together, and `parallelize`, which lays a model out over it."""
