"""Sliding-window attention with attention sinks: the positions that a row of a windowed layer sees. No tensors.

A row at position p sees the last `size` positions up to its own, as in Mistral and Qwen, and the first `num_sinks`
positions of the sequence (Xiao et al. 2024). Positions count the sequence, not the cache.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The window of the layers in `layers`; all other layers have full attention."""

    size: int
    layers: frozenset[int]
    num_sinks: int = 0

    def start(self, position: int) -> int:
        """Return the first position that a row at `position` sees in addition to the sinks."""
        return max(0, position + 1 - self.size)
