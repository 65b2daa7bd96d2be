"""Decoder, catalogue codes, student, weights and the bundle registry."""
