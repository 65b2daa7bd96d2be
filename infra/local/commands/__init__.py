"""The commands of `tailrace` that act on the embedded stack."""
