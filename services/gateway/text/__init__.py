"""The text tier behind the OpenAI door and the rationale."""
