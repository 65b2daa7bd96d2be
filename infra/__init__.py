"""Deployment: CLI, embedded stack, containers, Kubernetes, monitoring."""
