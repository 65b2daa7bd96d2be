"""The compiled forward pass for CPUs: its C++ sources, how they are built and called. All of it is optional."""
