"""A user's own data: erased with a receipt, and handed out."""
