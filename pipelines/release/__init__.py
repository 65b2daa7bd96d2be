"""Releases judge themselves: a process reads what was shown and clicked, compares candidate and live version, and moves each release on or back."""
