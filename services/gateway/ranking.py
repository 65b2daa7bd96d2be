"""A tier's ranking of items, and the merge of several rankings into one list. Pure; numpy only.

A ranking is item indices, best first, and their scores.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.catalogue import Catalogue
from services.contracts.recommend import ScoredItem, Tier
from services.items.layout import ItemLayout

NUM_CANDIDATES = 200
"""Number of candidates that rules choose from, for lists of up to half that length."""
Chosen = tuple[int, float, Tier]
"""An item of a list: index, score, and the tier that ranked it."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemRanking:
    """One tier's ranking: item indices (n,) int, best first, without duplicates, and their scores (n,) float."""

    tier: Tier
    indices: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, tier: Tier, item_ids: Sequence[str], scores: Sequence[float], catalogue: Catalogue) -> "ItemRanking":
        """Make a ranking from item ids, skipping duplicates and ids missing from the catalogue."""
        score_of: dict[int, float] = {}
        for item_id, score in zip(item_ids, scores, strict=True):
            if (index := catalogue.index_of.get(item_id)) is not None:
                score_of.setdefault(index, score)
        return cls.in_order(tier, score_of)

    @classmethod
    def in_order(cls, tier: Tier, score_of: Mapping[int, float]) -> "ItemRanking":
        """Make a ranking from scores by item index, best first."""
        indices, scores = list(score_of), list(score_of.values())
        return cls(tier, np.array(indices, dtype=np.int64), np.array(scores, dtype=np.float64))


def best_allowed(order: np.ndarray, scores: np.ndarray, allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first k allowed items of a full ranking, scanning no further than needed."""
    if len(order) > len(allowed):  # ranked after the mask was made, with new items
        is_masked = order < len(allowed)
        order, scores = order[is_masked], scores[is_masked]
    num_seen = 4 * k
    while len(kept := np.flatnonzero(allowed[order[:num_seen]])[:k]) < k and num_seen < len(order):
        num_seen *= 8
    return order[kept], scores[kept]


def merge(
    rankings: Iterable[ItemRanking],
    allowed: np.ndarray,
    k: int,
    available: np.ndarray,
    num_enough: int | None = None,
) -> Sequence[ItemRanking]:
    """Take the first k allowed items over the rankings in turn, without duplicates.

    Returns the remaining part of each ranking. Later rankings are consumed only if the earlier ones have fewer than
    `num_enough` such items (None: fewer than k). `available` (at least as many items, bool) is the current live
    catalogue and excludes items hidden since `allowed` was made. A later ranking's scores are lowered where needed, so
    that scores never increase along the list.
    """
    num_enough = k if num_enough is None else min(k, num_enough)
    parts: list[ItemRanking] = []
    num_taken = 0
    for ranking in rankings:
        indices = ranking.indices
        may_be_shown = allowed[indices] & available[indices]
        if parts:  # for a few hundred items a loop is faster than np.isin, which sorts
            taken = {index for part in parts for index in part.indices.tolist()}
            may_be_shown &= np.array([index not in taken for index in indices.tolist()], dtype=bool)
        kept = may_be_shown.nonzero()[0][: k - num_taken]
        if len(kept):
            scores = ranking.scores[kept]
            if parts:
                last = parts[-1].scores[-1]
                scores = np.minimum(scores + min(0.0, last - scores[0]), last)  # the sum may round up
            parts.append(ItemRanking(ranking.tier, indices[kept], np.minimum.accumulate(scores)))
            num_taken += len(kept)
        if num_taken >= num_enough:
            break
    return parts


def moves(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int | None, int | None]]:
    """Return the items of two lists: index, position (from 1) in the first, and in the second; None if absent."""
    places, now = ({index: position for position, index in enumerate(indices, 1)} for indices in (before, after))
    return [(index, places.get(index), now.get(index)) for index in dict.fromkeys((*after, *before))]


def choose(rankings: Iterable[ItemRanking], allowed: np.ndarray, k: int, available: np.ndarray) -> list[Chosen]:
    return as_chosen(merge(rankings, allowed, k, available))


def as_chosen(parts: Iterable[ItemRanking]) -> list[Chosen]:
    return [
        (index, score, part.tier)
        for part in parts
        for index, score in zip(part.indices.tolist(), part.scores.tolist(), strict=True)
    ]


def as_items(chosen: Iterable[Chosen], items: ItemLayout) -> tuple[ScoredItem, ...]:
    return tuple(
        ScoredItem(item_id=items.item_id(index), score=score, title=items.title(index), source=tier)
        for index, score, tier in chosen
    )
