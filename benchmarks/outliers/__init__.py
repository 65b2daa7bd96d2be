"""What outliers of a few rankings or of one replica cost the other requests."""
