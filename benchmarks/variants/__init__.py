"""Variants of one decoder against the engine's own int8."""
