"""Sliding-window attention with sinks: which positions a row of a windowed layer sees. A pattern, no tensors.

A row at position p sees the last `size` positions up to its own, as in Mistral and Qwen, and the first `num_sinks` of the
sequence (attention sinks; Xiao et al. 2024), both in their own positions.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The window of the layers in `layers`; all other layers see everything before them."""

    size: int
    layers: frozenset[int]
    num_sinks: int = 0

    def start(self, position: int) -> int:
        """Return the first position that a row at `position` sees besides the sinks."""
        return max(0, position + 1 - self.size)
