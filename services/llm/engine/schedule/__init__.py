"""Continuous batching: sequences, the queue, the scheduler, the step plan."""
