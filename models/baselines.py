"""Three untrained baselines: popularity, bigram, item-kNN.

Each is built from training sequences of item indices and scores histories (oldest first) over all items. Numpy only.
"""

from collections.abc import Sequence

import numpy as np

_KEPT_NUMBERS = 1 << 27
"""Maximum number of similarities kept: 1 GiB, enough for all pairs of up to 11,000 items."""
_FEW = 8
"""If an item's users have fewer events than the catalogue size divided by this, counts are sorted instead of kept per
item."""

_Row = tuple[slice | np.ndarray, np.ndarray]
"""The nonzero similarities of an item: indices in the catalogue, and values."""


class Popularity:
    """Popularity: the same ranking for every user, by count of training events."""

    def __init__(self, sequences: Sequence[np.ndarray], num_items: int) -> None:
        self._counts_V = np.bincount(_flat(sequences), minlength=num_items).astype(np.float64)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, num_items), read-only."""
        return np.broadcast_to(self._counts_V, (len(histories), len(self._counts_V)))


class Bigram:
    """First-order Markov: how often an item directly followed the newest item; ties are broken by popularity."""

    def __init__(self, sequences: Sequence[np.ndarray], num_items: int) -> None:
        counts_V = np.bincount(_flat(sequences), minlength=num_items)
        self._tie_V = counts_V / (counts_V.sum() + 1)
        before, after = _flat([items[:-1] for items in sequences]), _flat([items[1:] for items in sequences])
        pairs, self._counts = np.unique(before * num_items + after, return_counts=True)
        self._followers = pairs % num_items
        self._starts = np.searchsorted(pairs, np.arange(num_items + 1) * num_items)

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, num_items)."""
        scores_BV = np.tile(self._tie_V, (len(histories), 1))
        for scores_V, history in zip(scores_BV, histories, strict=True):
            if len(history):
                span = slice(*self._starts[history[-1] : history[-1] + 2])
                scores_V[self._followers[span]] += self._counts[span]
        return scores_BV


class ItemKnn:
    """Cosine similarity of the items' user sets, summed over the newest items with recency-decayed weights."""

    def __init__(
        self, sequences: Sequence[np.ndarray], num_items: int, *, newest: int = 20, decay: float = 0.8
    ) -> None:
        self._num_items, self._newest, self._decay = num_items, newest, decay
        self._sets = [np.unique(sequence) for sequence in sequences]
        items = _flat(self._sets)
        sizes_V = np.bincount(items, minlength=num_items)
        self._norm_V = np.sqrt(np.maximum(sizes_V, 1))
        owners = np.repeat(np.arange(len(self._sets)), [len(members) for members in self._sets])
        self._users, self._starts = owners[np.argsort(items, kind="stable")], np.append(0, np.cumsum(sizes_V))
        self._frequent = frozenset(np.argsort(-sizes_V)[: _KEPT_NUMBERS // num_items].tolist())
        self._kept: dict[int, _Row] = {}

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories -> (B, num_items)."""
        scores_BV = np.zeros((len(histories), self._num_items))
        for scores_V, history in zip(scores_BV, histories, strict=True):
            for steps_back, item in enumerate(history[-self._newest :][::-1].tolist()):
                places, similarity = self._similar(item)
                scores_V[places] += self._decay**steps_back * similarity
        return scores_BV

    def _similar(self, item: int) -> _Row:
        row = self._kept.get(item) or self._similarity(item)
        if item in self._frequent:
            self._kept[item] = row
        return row

    def _similarity(self, item: int) -> _Row:
        users = self._users[slice(*self._starts[item : item + 2])]
        shared = _flat([self._sets[user] for user in users])
        if len(shared) < self._num_items // _FEW:
            places, counts = np.unique(shared, return_counts=True)
            similarity = counts / self._norm_V[places] / self._norm_V[item]
            similarity[places == item] = 0.0
            return places, similarity
        counts_V = np.bincount(shared, minlength=self._num_items)
        similarity_V = counts_V / self._norm_V / self._norm_V[item]
        similarity_V[item] = 0.0
        return slice(None), similarity_V


def _flat(sequences: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(sequences) if len(sequences) else np.zeros(0, dtype=np.int64)
