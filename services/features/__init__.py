"""The Feast adapter: one read per request, batched writes for the stream worker."""
