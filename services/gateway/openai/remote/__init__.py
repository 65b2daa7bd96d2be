"""A text writer that calls another OpenAI-compatible server: client, request body, stream of chunks, errors."""
