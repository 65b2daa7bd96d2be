"""The OpenAI door: text, and recommendations as ranked choices, in OpenAI's words."""
