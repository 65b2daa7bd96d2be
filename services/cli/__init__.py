"""The `tailrace` command."""
