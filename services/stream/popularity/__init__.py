"""What is touched most within sliding windows, of one log partition."""
