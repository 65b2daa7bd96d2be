"""The compiled forward pass for CPUs: C++ sources, build and Python interface.

Optional: without it the engine runs on torch.
"""
