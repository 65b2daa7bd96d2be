"""Generates the Helm chart from the Kubernetes overlays: what `kubectl kustomize` renders, with values in its places."""
