"""A cluster of several machines on one: a network namespace for each, and faults of whole nodes."""
