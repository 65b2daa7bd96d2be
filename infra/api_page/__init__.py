"""Makes docs/api.md from what the doors say of themselves."""
