"""One record for each answer, and the sinks that consume it."""
