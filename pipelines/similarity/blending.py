"""Chooses the weights of a model and of the untrained sources on validation cases.

Cases are reduced to candidates: the best items of the model and of each source, and the label. Sources join one by one:
the source with the largest gain in NDCG@10 joins if the paired 95 % interval of its gain is above 0. Each half of the
cases chooses weights whose gain the opposite half measures, so that a source of noise gains nothing.
A model that adds nothing to the sources gets the weight 0.

Shape suffixes: E candidates of all cases together, S sources (the model is the first), N cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.mixer import MODEL, Source, summed
from pipelines.data.examples import Cases
from pipelines.scoring.metrics import Scorer, gains, interval

_TOP = 50
"""Best items of the model and of each source that are candidates of a case."""
_CUTOFF = 10
_STEPS = 2.0 ** np.arange(-12, 7)
"""Weights tried for a source, relative to the weight 1 of the model's probabilities."""
_FACTORS = 2.0 ** np.array([-2, -1, -0.5, -0.25, 0.25, 0.5, 1, 2])
"""Factors of a weight that are tried after its source has joined."""
_ROUNDS = 3
_MIN_CASES = 500
"""A slice of fewer cases uses the weights of all histories."""
_PER_BATCH = 32


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidates of the cases: the score of each source (E, S), the case (E,), and each case's label (N,), -1 if seen.

    `lengths_N` are the numbers of items of the histories.
    """

    scores_ES: np.ndarray
    case_E: np.ndarray
    label_N: np.ndarray
    lengths_N: np.ndarray

    def gains(self, weights_S: np.ndarray) -> np.ndarray:
        """Return each case's NDCG@10 (N,) with these weights."""
        mixed_E = self.scores_ES @ weights_S
        label_N = np.where(self.label_N >= 0, mixed_E[self.label_N], np.inf)
        at_E = label_N[self.case_E]
        num = len(self.label_N)
        above_N = np.bincount(self.case_E, mixed_E > at_E, minlength=num)
        tied_N = np.bincount(self.case_E, mixed_E == at_E, minlength=num)
        ranks_N = np.where(label_N > 0, above_N + (tied_N + 1) / 2, np.inf)
        return gains(np.where(self.label_N >= 0, ranks_N, np.inf), _CUTOFF)

    def of(self, is_in_N: np.ndarray) -> "Candidates":
        """Return the candidates of some cases."""
        kept_E = is_in_N[self.case_E]
        new_case_N, new_place_E = np.cumsum(is_in_N) - 1, np.cumsum(kept_E) - 1
        labels = self.label_N[is_in_N]
        return Candidates(
            self.scores_ES[kept_E],
            new_case_N[self.case_E[kept_E]],
            np.where(labels >= 0, new_place_E[labels], -1),
            self.lengths_N[is_in_N],
        )


def candidates_of(cases: Cases, model: Scorer | None, sources: Mapping[str, Source], *, repeats: bool) -> Candidates:
    """Return the candidates of these cases, of the model (None: its scores are 0) and of each source in their order."""
    parts: list[np.ndarray] = []
    owners, labels, offset = [], [], 0
    for first in range(0, len(cases), _PER_BATCH):
        histories = cases.histories[first : first + _PER_BATCH]
        scored = [None] * len(histories) if model is None else model(histories)
        for number, (history, row) in enumerate(zip(histories, scored, strict=True), start=first):
            items, scores = _candidates(history, int(cases.targets[number]), row, sources, repeats=repeats)
            at = np.flatnonzero(items == cases.targets[number])
            labels.append(offset + int(at[0]) if len(at) else -1)
            parts.append(scores)
            owners.append(np.full(len(items), number))
            offset += len(items)
    lengths_N = np.array([len(history) for history in cases.histories])
    return Candidates(np.concatenate(parts), np.concatenate(owners), np.array(labels), lengths_N)


def _candidates(
    history: np.ndarray, label: int, row: np.ndarray | None, sources: Mapping[str, Source], *, repeats: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return one case's candidates, ascending, and the score of the model and of each source for them (n, S)."""
    read = [summed(*source.read(history)) for source in sources.values()]
    seen = np.zeros(0, dtype=np.int64) if repeats else history
    chosen = [np.array([label])]
    for items, scores in read:
        unseen = ~np.isin(items, seen)
        chosen.append(items[unseen][_top(scores[unseen])])
    if row is not None:
        hidden = row.copy()
        hidden[seen] = -np.inf
        chosen.append(_top(hidden))
    union = np.setdiff1d(np.concatenate(chosen), seen)
    scores_S = [np.zeros(len(union)) if row is None else row[union]]
    for items, scores in read:
        at = np.minimum(np.searchsorted(items, union), max(0, len(items) - 1))
        scores_S.append(np.where(items[at] == union, scores[at], 0.0) if len(items) else np.zeros(len(union)))
    return union, np.stack(scores_S, axis=1)


def _top(scores: np.ndarray) -> np.ndarray:
    return np.argpartition(-scores, _TOP)[:_TOP] if len(scores) > _TOP else np.arange(len(scores))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Weights by source, without sources that add nothing, and the gain of each source on validation, in order."""

    weights: Mapping[str, float]
    earned: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def choose(candidates: Candidates, names: Sequence[str], *, has_model: bool) -> Chosen:
    """Return the weights for these cases; `names` are the sources in the order of the candidates, after the model."""
    columns, halves = [MODEL, *names], _Halves(candidates)
    places = range(1, len(columns))
    start = 0 if has_model else max(places, key=lambda column: _ndcg(candidates, _unit(len(columns), column)))
    joined, weights = [start], np.tile(_unit(len(columns), start), (3, 1))
    earned: list[dict[str, Any]] = []
    while offers := {column: halves.along(weights, column) for column in places if column not in joined}:
        best = max(offers, key=lambda column: _ndcg(candidates, offers[column][0]))
        gain = halves.gain(weights, offers[best])
        if not gain["low"] > 0:
            break
        joined.append(best)
        earned.append({"source": columns[best], **gain})
        weights = halves.tuned(offers[best], joined)
    if has_model and len(joined) > 1:
        without = halves.tuned(weights * (np.arange(len(columns)) > 0), joined[1:])
        gain = halves.gain(without, weights)
        earned.insert(0, {"source": MODEL, **gain})
        weights = weights if gain["low"] > 0 else without
    return Chosen(weights=_named(columns, weights[0]), earned=earned)


def choose_in_slice(candidates: Candidates, names: Sequence[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights tuned on a slice of the cases if they gain beyond the 95 % interval, else the given weights."""
    if len(candidates.label_N) < _MIN_CASES:
        return dict(weights)
    columns, halves = [MODEL, *names], _Halves(candidates)
    start = np.tile([weights.get(name, 0.0) for name in columns], (3, 1))
    tuned = halves.tuned(start, np.flatnonzero(start[0]).tolist())
    return _named(columns, tuned[0]) if halves.gain(start, tuned)["low"] > 0 else dict(weights)


def _named(columns: Sequence[str], weights_S: np.ndarray) -> dict[str, float]:
    return {name: float(weight) for name, weight in zip(columns, weights_S, strict=True) if weight}


class _Halves:
    """Chooses weights on all cases and on each half, and measures gains of each half's weights on the other half.

    Weights (3, S) are those of all cases and of each half.
    """

    def __init__(self, candidates: Candidates) -> None:
        is_even_N = np.arange(len(candidates.label_N)) % 2 == 0
        self._parts = (candidates, candidates.of(is_even_N), candidates.of(~is_even_N))

    def along(self, weights_3S: np.ndarray, column: int) -> np.ndarray:
        """Return the best weights that differ only in one source."""
        own = zip(self._parts, weights_3S, strict=True)
        return np.stack([_along(part, weights_S, column, _STEPS) for part, weights_S in own])

    def tuned(self, weights_3S: np.ndarray, joined: Sequence[int]) -> np.ndarray:
        """Return the weights after rounds over the joined sources; the first keeps its weight."""
        own = zip(self._parts, weights_3S, strict=True)
        return np.stack([_tuned(part, weights_S, joined) for part, weights_S in own])

    def gain(self, before_3S: np.ndarray, after_3S: np.ndarray) -> dict[str, float]:
        """Return the mean gain of each half's weights on the other half, with its paired 95 % interval."""
        crossed = zip(self._parts[1:], before_3S[:0:-1], after_3S[:0:-1], strict=True)
        gains_N = np.concatenate([part.gains(after_S) - part.gains(before_S) for part, before_S, after_S in crossed])
        low, high = interval(gains_N, seed=0)
        return {"gain": float(gains_N.mean()), "low": low, "high": high}


def _along(candidates: Candidates, weights_S: np.ndarray, column: int, steps: np.ndarray) -> np.ndarray:
    """Return the best weights that differ only in one source; the given ones on ties."""
    best_S, best = weights_S, _ndcg(candidates, weights_S)
    for step in steps:
        tried_S = weights_S.copy()
        tried_S[column] = step
        if (ndcg := _ndcg(candidates, tried_S)) > best:
            best_S, best = tried_S, ndcg
    return best_S


def _tuned(candidates: Candidates, weights_S: np.ndarray, joined: Sequence[int]) -> np.ndarray:
    for _ in range(_ROUNDS):
        before_S = weights_S
        for column in joined[1:]:
            weights_S = _along(candidates, weights_S, column, weights_S[column] * _FACTORS)
        if (weights_S == before_S).all():
            break
    return weights_S


def _unit(size: int, column: int) -> np.ndarray:
    weights_S = np.zeros(size)
    weights_S[column] = 1.0
    return weights_S


def _ndcg(candidates: Candidates, weights_S: np.ndarray) -> float:
    return float(candidates.gains(weights_S).mean())
