"""The standby gateway, which answers without Ray."""
