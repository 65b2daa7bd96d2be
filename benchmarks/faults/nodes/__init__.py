"""A cluster of several machines on one: a network namespace for each, and the faults of a whole node."""
