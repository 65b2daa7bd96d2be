"""The inputs of a ranking: live bundle, context, masks and page tokens."""
