"""Every claim of speed or quality: its command and its last results."""
