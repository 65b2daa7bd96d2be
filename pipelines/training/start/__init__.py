"""What weights begin as."""
