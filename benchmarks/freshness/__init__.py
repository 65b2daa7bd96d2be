"""Time until an event, an erasure or a hidden item shows in the answers."""
