"""Modules that both deployments share: engine thread, inbox, streams, metrics, routing."""
