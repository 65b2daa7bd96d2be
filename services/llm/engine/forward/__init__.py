"""The forward pass that CPU and GPU share: layers, operations, weights, attention."""
