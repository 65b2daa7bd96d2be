"""Many models: residency of names in gateways over an object store, and a simulated cluster."""
