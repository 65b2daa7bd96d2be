"""The forward pass: runner, layers, weights, attention."""
