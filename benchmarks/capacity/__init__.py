"""What one request and one event cost, and `tailrace plan load`, which sizes a deployment from it."""
