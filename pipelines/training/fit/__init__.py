"""One fit: batches, steps, checkpoints, and the device that it runs on."""
