"""The inputs of a ranking: live bundle, context, candidates and page tokens."""
