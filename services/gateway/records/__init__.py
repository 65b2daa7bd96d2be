"""One record per answer, and the sinks that consume it."""
