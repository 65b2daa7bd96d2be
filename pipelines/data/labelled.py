"""A sequence to learn from, with or without weights of its labels and dislikes between them. Numpy alone: the fit reads it on any machine."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Dislikes:
    """Items that are learned against, each at a place of its sequence: the history before it are the first `places` items. All three are (M,), and weights are above 0."""

    items: np.ndarray
    places: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        """The number of dislikes."""
        return len(self.items)

    def within(self, start: int, end: int) -> "Dislikes | None":
        """Return those of the part of the sequence from `start` to before `end`, by their places there; None without any.

        One at the border of two parts belongs to the earlier, at whose end its history is whole.
        """
        own = (self.places >= (start + 1 if start else 0)) & (self.places <= end)
        return Dislikes(self.items[own], self.places[own] - start, self.weights[own]) if own.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """A sequence of items with the weight of each as a label, 0 for those that are none; both are (N,). Dislikes are no items of it."""

    items: np.ndarray
    weights: np.ndarray
    dislikes: Dislikes | None = None

    def __len__(self) -> int:
        """The number of items."""
        return len(self.items)

    def __getitem__(self, part: slice) -> "Weighted":
        """Return a part of it."""
        start, end, _ = part.indices(len(self))
        own = None if self.dislikes is None else self.dislikes.within(start, end)
        return Weighted(self.items[part], self.weights[part], own)


Labelled = np.ndarray | Weighted
"""A sequence to learn from; all items of an array are labels of weight 1."""


def items_of(sequence: Labelled) -> np.ndarray:
    """Return the items of a sequence."""
    return sequence.items if isinstance(sequence, Weighted) else sequence


def weights_of(sequence: Labelled) -> np.ndarray:
    """Return the weights of a sequence's labels."""
    return sequence.weights if isinstance(sequence, Weighted) else np.ones(len(sequence), dtype=np.float32)


def dislikes_in(sequence: Labelled) -> Dislikes | None:
    """Return what is learned against in a sequence, None for nothing."""
    return sequence.dislikes if isinstance(sequence, Weighted) else None
