"""What the doors share: headers, operations and their OpenAPI document, the HTTP application."""
