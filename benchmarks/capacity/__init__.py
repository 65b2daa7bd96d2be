"""What one request and one event cost."""
