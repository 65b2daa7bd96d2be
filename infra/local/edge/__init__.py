"""HAProxy at the edge: its configuration, its process, its admin socket."""
