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
_DRAWN_AT_ONCE = 1 << 22
"""Draws of the bootstrap in memory, 16 bytes each: all of them at once are 16 kB a case."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The label's rank for each case, from 1, halves on ties."""

    masked: np.ndarray
    unmasked: np.ndarray

    def as_served(self, *, repeats: bool) -> np.ndarray:
        """Return the ranks that evaluation uses: seen items compete too if users repeat items."""
        return self.unmasked if repeats else self.masked


def rank_labels(scorer: Scorer, cases: Cases) -> Ranks:
    """Score every case and rank its label; histories of about one length go together."""
    ranks = Ranks(np.empty(len(cases)), np.empty(len(cases)))
    by_length = np.argsort([len(history) for history in cases.histories], kind="stable")
    for rows in np.split(by_length, range(_CASES_PER_BATCH, len(cases), _CASES_PER_BATCH)):
        scores = scorer([cases.histories[row] for row in rows])
        for row, score in zip(rows, scores, strict=True):
            label_ranks = mean_ranks(score, int(cases.targets[row]), cases.histories[row])
            ranks.unmasked[row], ranks.masked[row] = label_ranks
    return ranks


def mean_ranks(scores: np.ndarray, target: int, history: np.ndarray) -> tuple[float, float]:
    """Return `target`'s rank from 1, unmasked and with the history masked. Ties share the mean rank; NaN ranks last.

    The catalogue's scores are read at most twice and never copied; only boolean arrays have its length.
    """
    at, seen = scores[target], scores[np.unique(history)]
    above, tied = _above_and_tied(scores, at)
    unmasked = above + (tied + 1) / 2
    if (history == target).any():
        at = -np.inf
        above, tied = _above_and_tied(scores, at)
    seen_above, seen_tied = _above_and_tied(seen, at)
    tied += seen_above if not at > -np.inf else -seen_tied  # seen items tie with items without a score
    return unmasked, above - seen_above + (tied + 1) / 2


def _above_and_tied(scores: np.ndarray, at: float) -> tuple[int, int]:
    """Return how many scores are higher, and how many the same. NaN is as -inf: no comparison with it holds."""
    if at > -np.inf:
        return int(np.count_nonzero(scores > at)), int(np.count_nonzero(scores == at))
    above = int(np.count_nonzero(scores > -np.inf))
    return above, len(scores) - above


def hit_rate(ranks: np.ndarray, cutoff: int) -> float:
    """Return the share of labels within the first `cutoff` ranks."""
    return float((ranks <= cutoff).mean())


def ndcg(ranks: np.ndarray, cutoff: int) -> float:
    """Return the mean over labels of 1 / log2(1 + rank), 0 for a rank beyond `cutoff`."""
    return float(gains(ranks, cutoff).mean())


def gains(ranks: np.ndarray, cutoff: int) -> np.ndarray:
    """Return each case's contribution to NDCG."""
    return np.where(ranks <= cutoff, 1 / np.log2(1 + ranks), 0.0)


def interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean, resampling cases."""
    rng, num = np.random.default_rng(seed), len(values)
    size = max(1, _DRAWN_AT_ONCE // num)
    sizes = (min(size, _RESAMPLES - done) for done in range(0, _RESAMPLES, size))
    means = [values[rng.integers(0, num, (size, num))].mean(axis=1) for size in sizes]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def summarise(ranks: Ranks, *, repeats: bool = False) -> dict[str, float | list[float]]:
    """Return all metrics by name: `hr@5`, `ndcg@5`, ... as served, `..._unmasked`, and the interval of served NDCG@10.

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
