"""A sequence to learn from, with or without weights of its labels. Numpy alone: the fit reads it on any machine."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """A sequence of items with the weight of each as a label, 0 for those that are none; both are (N,)."""

    items: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        """The number of items."""
        return len(self.items)

    def __getitem__(self, part: slice) -> "Weighted":
        """Return a part of it."""
        return Weighted(self.items[part], self.weights[part])


Labelled = np.ndarray | Weighted
"""A sequence to learn from; all items of an array are labels of weight 1."""


def items_of(sequence: Labelled) -> np.ndarray:
    """Return the items of a sequence."""
    return sequence.items if isinstance(sequence, Weighted) else sequence


def weights_of(sequence: Labelled) -> np.ndarray:
    """Return the weights of a sequence's labels."""
    return sequence.weights if isinstance(sequence, Weighted) else np.ones(len(sequence), dtype=np.float32)
