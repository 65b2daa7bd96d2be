"""What to run first on a graphics card: `make gpu-check`."""
