"""The servers of the embedded stack and how each is started."""
