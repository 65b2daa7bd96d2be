"""Import of a shop's tables into the live catalogue and the event log: batched, validated row by row, resumable."""
