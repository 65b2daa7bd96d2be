"""The supervisor: what runs, in which order, and what is restarted."""
