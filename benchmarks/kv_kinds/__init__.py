"""What the KV cache's data types cost in quality."""
