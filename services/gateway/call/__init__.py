"""Code shared by the doors: headers, operations and their OpenAPI document, the HTTP application."""
