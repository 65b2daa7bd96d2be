"""Kubernetes manifests, and what makes those of them that repeat other files."""
