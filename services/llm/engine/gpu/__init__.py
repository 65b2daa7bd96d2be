"""The forward pass of a GPU: Triton kernels behind the engine's protocols, and decode and beam steps recorded as graphs."""
