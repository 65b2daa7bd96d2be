"""Metrics, the evaluation of a model, and the gate before publication."""
