"""Coverage and calibration of the test users' top ten lists. Pure; numpy only.

Coverage is the fraction of the catalogue in at least one list. Calibration is C_KL of Steck, "Calibrated
Recommendations" (RecSys 2018, equations 5 and 6), over the popularity groups head, torso, tail and new instead of
genres, which some data sets lack: with p the distribution of the user's history and q that of the list, sum(p * ln(p /
(.99 q + .01 p))), the mean over users. It is 0 if each list has its user's own mix, and at most ln(100) = 4.6.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.evaluation.gain import SHELVES
from pipelines.scoring.metrics import Scorer, interval

_LENGTH = 10
_SMOOTHING = 0.01
"""Steck's alpha: the weight of the history in the list's mix, which keeps the divergence finite for an absent group."""


class ListedScorer:
    """Delegates to a scorer and takes each history's list from its scores. `shelves` is each item's index in `SHELVES`.

    Lists are as served: without the items of the history, unless the data has `repeats`; an item with the score -inf or
    NaN is in no list. Ties are cut anywhere.
    """

    def __init__(self, scorer: Scorer, shelves: np.ndarray, *, repeats: bool) -> None:
        self._scorer, self._shelves, self._repeats = scorer, shelves, repeats
        self._num_lists = np.zeros(len(shelves), dtype=np.int64)
        self._divergences: list[float] = []
        self._in_histories, self._in_lists = np.zeros(len(SHELVES)), np.zeros(len(SHELVES))

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score histories of item indices -> (B, V)."""
        scores_BV = self._scorer(histories)
        for history, scores in zip(histories, scores_BV, strict=True):
            self._count(history, best_items(scores, () if self._repeats else history))
        return scores_BV

    def summary(self) -> dict[str, Any]:
        """Return `coverage@10`, `calibration@10` with its 95 % interval, and the shelves' shares."""
        divergences, num = np.array(self._divergences), max(1, len(self._divergences))
        return {
            "coverage@10": float((self._num_lists > 0).mean()),
            "calibration@10": float(divergences.mean()),
            "calibration@10_interval": list(interval(divergences, seed=0)),
            "shares": {
                of: dict(zip(SHELVES, (summed / num).tolist(), strict=True))
                for of, summed in (("histories", self._in_histories), ("lists", self._in_lists))
            },
        }

    def _count(self, history: np.ndarray, listed: np.ndarray) -> None:
        self._num_lists[listed] += 1
        of_history, of_list = (self._shares(items) for items in (history, listed))
        self._divergences.append(divergence(of_history, of_list))
        self._in_histories += of_history
        self._in_lists += of_list

    def _shares(self, items: np.ndarray) -> np.ndarray:
        counts = np.bincount(self._shelves[items], minlength=len(SHELVES))
        return np.asarray(counts / max(1, len(items)))


def best_items(scores: np.ndarray, excluded: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the indices of the ten highest scores, without excluded items and in any order, or of all scored items."""
    ranked = scores.copy()
    ranked[np.asarray(excluded, dtype=np.int64)] = -np.inf
    size = max(1, math.isqrt(len(ranked) // _LENGTH))
    highest = np.fmax.reduceat(ranked, np.arange(0, len(ranked), size))
    blocks = _highest(highest)  # items of any other block have at least ten items above or equal to them
    items = (blocks[:, None] * size + np.arange(size)).ravel()
    items = items[items < len(ranked)]
    best = items[_highest(ranked[items])]
    return np.asarray(best[np.isfinite(ranked[best])])


def _highest(values: np.ndarray) -> np.ndarray:
    """Return the indices of the ten highest, in any order. NaN counts as lowest."""
    return np.argpartition(-values, min(_LENGTH, len(values)) - 1)[:_LENGTH]


def divergence(history: np.ndarray, listed: np.ndarray) -> float:
    """Return the smoothed divergence of a list's shares from the history's, in nats.

    A user without history has no mix to keep: 0.
    """
    mixed = (1 - _SMOOTHING) * listed + _SMOOTHING * history
    held = history > 0
    return float((history[held] * np.log(history[held] / mixed[held])).sum())
