"""The Llama-family decoder: configuration, weights and the reference forward pass."""
