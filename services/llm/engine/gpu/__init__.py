"""The forward pass on a GPU: Triton kernels behind the interfaces of `forward/`, and steps captured as graphs."""
