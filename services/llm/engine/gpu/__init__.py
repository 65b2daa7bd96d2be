"""The forward pass on a GPU: Triton kernels behind the interfaces of `forward/`, and decode and beam steps captured as graphs."""
