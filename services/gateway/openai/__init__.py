"""The OpenAI door: text in OpenAI's words."""
