"""A training sequence, with or without label weights and dislikes. Depends only on numpy and runs anywhere."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Dislikes:
    """Items to train against, each at a position of the sequence: its history is the first `places` items.

    All three arrays are (M,); weights are above 0.
    """

    items: np.ndarray
    places: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.items)

    def within(self, start: int, end: int) -> "Dislikes | None":
        """Return the dislikes of the subsequence from `start` to before `end`, by their positions in it; None if empty.

        A dislike at the border of two subsequences belongs to the earlier, at whose end its history is complete.
        """
        own = (self.places >= (start + 1 if start else 0)) & (self.places <= end)
        return Dislikes(self.items[own], self.places[own] - start, self.weights[own]) if own.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """A sequence of items with the weight of each as a label, 0 for items that are not labels; both are (N,).

    Disliked items are not part of it.
    """

    items: np.ndarray
    weights: np.ndarray
    dislikes: Dislikes | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, part: slice) -> "Weighted":
        start, end, _ = part.indices(len(self))
        own = None if self.dislikes is None else self.dislikes.within(start, end)
        return Weighted(self.items[part], self.weights[part], own)


Labelled = np.ndarray | Weighted
"""A training sequence; all items of an array are labels of weight 1."""


def items_of(sequence: Labelled) -> np.ndarray:
    return sequence.items if isinstance(sequence, Weighted) else sequence


def weights_of(sequence: Labelled) -> np.ndarray:
    return sequence.weights if isinstance(sequence, Weighted) else np.ones(len(sequence), dtype=np.float32)


def dislikes_in(sequence: Labelled) -> Dislikes | None:
    return sequence.dislikes if isinstance(sequence, Weighted) else None
