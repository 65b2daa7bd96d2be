"""Generates the Helm chart from the Kubernetes overlays: the output of `kubectl kustomize`, with values inserted."""
