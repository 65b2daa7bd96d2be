"""What all doors share: request headers, spans, the error table."""
