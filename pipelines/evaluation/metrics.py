"""HR, NDCG and their bootstrap interval from the ranks of labels among ALL items. Pure; numpy only.

Masked means that the items of the history are removed before ranking, so a label that repeats an item of the history
is always missed. A label that ties with others gets their mean rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.data.examples import Cases

Scorer = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Histories of item indices, oldest first -> scores (num_histories, num_items)."""

CUTOFFS = (5, 10)
_CASES_PER_BATCH = 32
_RESAMPLES = 1_000


@dataclass(frozen=True, slots=True)
class Ranks:
    """The label's rank for each case, from 1, halves on ties."""

    masked: np.ndarray
    unmasked: np.ndarray

    def as_served(self, *, repeats: bool) -> np.ndarray:
        """Return the ranks by which a model is judged: where users come back to items, seen ones compete too."""
        return self.unmasked if repeats else self.masked


def rank_labels(scorer: Scorer, cases: Cases) -> Ranks:
    """Score every case and rank its label; histories of about one length go together."""
    ranks = Ranks(np.empty(len(cases)), np.empty(len(cases)))
    by_length = np.argsort([len(history) for history in cases.histories], kind="stable")
    for rows in np.split(by_length, range(_CASES_PER_BATCH, len(cases), _CASES_PER_BATCH)):
        scores = scorer([cases.histories[row] for row in rows]).astype(np.float64)
        for row, score in zip(rows, scores, strict=True):
            ranks.unmasked[row] = mean_rank(score, int(cases.targets[row]))
            score[cases.histories[row]] = -np.inf
            ranks.masked[row] = mean_rank(score, int(cases.targets[row]))
    return ranks


def mean_rank(scores: np.ndarray, target: int) -> float:
    """Return the rank from 1 of `target`: the mean of its own and its ties' ranks. NaN ranks last."""
    finite = np.where(np.isnan(scores), -np.inf, scores)
    above = int((finite > finite[target]).sum())
    tied = int((finite == finite[target]).sum())
    return above + (tied + 1) / 2


def hit_rate(ranks: np.ndarray, cutoff: int) -> float:
    """Return the share of labels within the first `cutoff` ranks."""
    return float((ranks <= cutoff).mean())


def ndcg(ranks: np.ndarray, cutoff: int) -> float:
    """Return the mean of 1 / log2(1 + rank) over labels within the first `cutoff` ranks, 0 for the others."""
    return float(gains(ranks, cutoff).mean())


def gains(ranks: np.ndarray, cutoff: int) -> np.ndarray:
    """Return each case's contribution to NDCG."""
    return np.where(ranks <= cutoff, 1 / np.log2(1 + ranks), 0.0)


def interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean, resampling cases."""
    draws = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def summarise(ranks: Ranks, *, repeats: bool = False) -> dict[str, float | list[float]]:
    """Return all metrics by name: `hr@5`, `ndcg@5`, ... as served, `..._unmasked`, and the interval of the NDCG@10 as served.

    As served is masked, unless the data has `repeats`.
    """
    named: dict[str, float | list[float]] = {}
    served = ranks.as_served(repeats=repeats)
    for suffix, values in (("", served), ("_unmasked", ranks.unmasked)):
        for cutoff in CUTOFFS:
            named[f"hr@{cutoff}{suffix}"] = hit_rate(values, cutoff)
            named[f"ndcg@{cutoff}{suffix}"] = ndcg(values, cutoff)
    named["ndcg@10_interval"] = list(interval(gains(served, 10), seed=0))
    return named
