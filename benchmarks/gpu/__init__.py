"""First checks on a GPU: `make gpu-check`."""
