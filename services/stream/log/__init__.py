"""The offline log of raw events: its kinds, files and merges, and the ledger of erasures that filters it."""
