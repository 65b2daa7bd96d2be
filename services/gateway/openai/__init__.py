"""The OpenAI door: text generation with OpenAI's API."""
