"""Load through both doors while one part breaks and recovers."""
