"""What one request and one event cost, and `tailrace plan`, which sizes a deployment from it."""
