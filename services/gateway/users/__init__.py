"""A user's own data: erasure with a receipt, and export."""
