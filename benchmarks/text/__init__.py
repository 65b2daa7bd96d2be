"""Streamed text: the door's cost over the bare engine, and what drafts save."""
