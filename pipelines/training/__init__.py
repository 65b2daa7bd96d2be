"""Train the decoder and distil the student."""
