"""Text through the OpenAI API: the platform's overhead over the bare engine."""
