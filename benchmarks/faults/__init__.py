"""Load through both doors while one part breaks and comes back."""
