"""Needs of a model before it runs: memory, layouts over GPUs, time of a step and of a request, and cost."""
