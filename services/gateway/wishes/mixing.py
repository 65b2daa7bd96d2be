"""Ranks the items of all tiers together for a wish. Pure; numpy only."""

from collections.abc import Iterable

import numpy as np

from models.mixer import best_of, softmax
from models.wishes.mixing import WishMix
from services.contracts.recommend import Tier
from services.gateway.ranking import ItemRanking
from services.gateway.request.wish import ReadWish

_OF_SHARES = frozenset({Tier.POPULAR, Tier.SIMILAR})
"""Tiers whose scores are not logarithms."""
_TITLE_WEIGHT = 20.0
"""A title that matches every word of a search counts more than any reading."""


def mixed(
    rankings: Iterable[ItemRanking], wish: ReadWish, mix: WishMix, answering: Tier, allowed: np.ndarray, num: int
) -> ItemRanking:
    """Return the best `num` allowed items by the tiers' rankings and the wish, as a ranking of the answering tier.

    `allowed` is (num_items,) bool. Scores are logarithms or, of a tier of shares, probabilities.
    """
    num_items = len(allowed)
    ranked = [(ranking.indices, _probabilities(ranking)) for ranking in rankings if len(ranking.indices)]
    scores_V = mix.scores(ranked, wish.reading, num_items).astype(np.float64)
    if wish.titles is not None:
        scores_V[: len(wish.titles)] += _TITLE_WEIGHT * wish.titles[:num_items]
    items = np.flatnonzero(allowed)
    best, logs = _best(items, scores_V[items], num)
    return ItemRanking(answering, best, np.exp(logs - np.logaddexp.reduce(logs)) if answering in _OF_SHARES else logs)


def _best(items: np.ndarray, logs: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `num` items, best first (ties by index), and their logarithms."""
    highest = float(logs.max(initial=-np.inf))
    best, scores = best_of(items, np.exp(np.maximum(logs - highest, -600.0)), num)
    return best, scores + highest


def _probabilities(ranking: ItemRanking) -> np.ndarray:
    if ranking.tier not in _OF_SHARES:
        return softmax(ranking.scores)
    shares = np.maximum(ranking.scores, 0.0)
    total = float(shares.sum())
    return shares / total if total > 0 else np.full(len(shares), 1 / len(shares))
