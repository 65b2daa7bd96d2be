"""Authorization: API keys, scopes, rates."""
