"""The cost of one request and one event."""
