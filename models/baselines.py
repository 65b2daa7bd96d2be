"""Three recommenders without trained weights, with which every model is compared: popularity, bigram, item-kNN.

Each is built from training sequences of item indices and scores histories (oldest first) over all items. Numpy only.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_KEPT_NUMBERS = 1 << 27
"""Similarities kept, a row of the catalogue's length for each item asked for: 1 GiB, all of them up to 11,000 items."""


class Popularity:
    """The same ranking for every user: counts of training events."""

    def __init__(self, sequences: Sequence[np.ndarray], num_items: int) -> None:
        self._counts_V = np.bincount(_flat(sequences), minlength=num_items).astype(np.float64)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, num_items)."""
        return np.tile(self._counts_V, (len(histories), 1))


class Bigram:
    """First-order Markov: how often an item directly followed the newest one; ties are broken by popularity."""

    def __init__(self, sequences: Sequence[np.ndarray], num_items: int) -> None:
        counts_V = np.bincount(_flat(sequences), minlength=num_items)
        self._tie_V = counts_V / (counts_V.sum() + 1)
        self._followers: dict[int, list[int]] = {}
        for sequence in sequences:
            for item, follower in zip(sequence[:-1].tolist(), sequence[1:].tolist(), strict=True):
                self._followers.setdefault(item, []).append(follower)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, num_items)."""
        return np.stack([self._row(history) for history in histories])

    def _row(self, history: np.ndarray) -> np.ndarray:
        followers = self._followers.get(int(history[-1]), []) if len(history) else []
        counts_V = np.bincount(np.array(followers, dtype=np.int64), minlength=len(self._tie_V))
        return np.asarray(counts_V + self._tie_V)


class ItemKnn:
    """Cosine similarity of the items' sets of users, summed over the newest items with a weight that decays with recency."""

    def __init__(
        self, sequences: Sequence[np.ndarray], num_items: int, *, newest: int = 20, decay: float = 0.8
    ) -> None:
        self._num_items, self._newest, self._decay = num_items, newest, decay
        self._sets = [np.unique(sequence) for sequence in sequences]
        self._users_of_item: dict[int, list[int]] = {}
        for user, members in enumerate(self._sets):
            for item in members.tolist():
                self._users_of_item.setdefault(item, []).append(user)
        sizes_V = np.bincount(_flat(self._sets), minlength=num_items)
        self._norm_V = np.sqrt(np.maximum(sizes_V, 1))
        self._similar = lru_cache(_KEPT_NUMBERS // num_items)(self._similarity)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, num_items)."""
        return np.stack([self._row(history[-self._newest :]) for history in histories])

    def _row(self, recent: np.ndarray) -> np.ndarray:
        score_V = np.zeros(self._num_items)
        for steps_back, item in enumerate(recent[::-1].tolist()):
            score_V += self._decay**steps_back * self._similar(item)
        return score_V

    def _similarity(self, item: int) -> np.ndarray:
        shared = [self._sets[user] for user in self._users_of_item.get(item, [])]
        counts_V = np.bincount(_flat(shared), minlength=self._num_items)
        similarity_V = counts_V / self._norm_V / self._norm_V[item]
        similarity_V[item] = 0.0
        return np.asarray(similarity_V)


def _flat(sequences: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(sequences) if len(sequences) else np.zeros(0, dtype=np.int64)
