"""A shop's tables into the live catalogue and the log of events: read in batches, checked row by row, resumable."""
