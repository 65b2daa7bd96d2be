"""Metrics, traces, logs and objectives."""
