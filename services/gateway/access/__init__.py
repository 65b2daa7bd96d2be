"""Who may call: API keys, rates, the audit log."""
