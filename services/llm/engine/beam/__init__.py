"""Beam search within a catalogue."""
