"""Export, precompute and publish a bundle."""
