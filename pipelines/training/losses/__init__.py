"""The losses of training: cross-entropy over the whole catalogue, over a sample of it, and along the codes of an item, and which positions are learned from."""
