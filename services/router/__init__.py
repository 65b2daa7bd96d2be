"""Deciding which tier answers: pure policy, deadline, latency predictor, breaker."""
