"""The supervisor: the parts of the stack, their order, and restarts."""
