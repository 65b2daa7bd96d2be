"""Variants of one decoder beside the engine's own int8."""
