"""Events to features: a pure aggregate, and the worker that does the I/O."""
