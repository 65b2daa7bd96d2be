"""Chooses factors that raise items without events in a mix, on validation cases.

A model's training labels include no new item, so its probabilities for them are too low: their text may fit a history
best among the new items, and yet no list shows them. Factors of the model's and of the sources' scores make up for it.
They rise as long as the other items lose at most a fraction of NDCG@10, and apply if labels that are new gain. They
hardly lose, so their mean decides: validation has few of them.

Shape suffixes: V items, N cases, R rungs.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from models.mixer import Mixer, NewItems
from pipelines.data.examples import Cases, cases_where, sample_cases
from pipelines.scoring.metrics import Scorer, gains

_RUNGS = (
    *((1.0, 1.0), (4.0, 1.0), (7.0, 1.0), (7.0, 1.25), (7.0, 1.5), (12.0, 1.5), (20.0, 1.5), (40.0, 1.5)),
    *((40.0, 2.0), (80.0, 2.0)),
)
"""Factors of the model's and of the sources' scores, in rising order; the first changes nothing."""
_MOST_LOST = 0.005
"""The fraction of NDCG@10 that labels with events may lose."""
_MIN_NEW, _MOST_OTHERS = 20, 30_000
_CUTOFF, _PER_BATCH = 10, 32


def choose_new_items(
    cases: Cases, probabilities: Scorer, mixer: Mixer, model: str, is_new_V: np.ndarray, *, repeats: bool
) -> dict[str, float] | None:
    """Return {model, sources, num_items} for a manifest; None if no factors help new items.

    `probabilities` are the model's over all items; `mixer` holds its blends.
    """
    is_new_N = is_new_V[cases.targets]
    if is_new_N.sum() < _MIN_NEW or not mixer.blends.get(model):
        return None
    new_RN, others_RN = (
        _gains(part, probabilities, mixer, model, is_new_V, repeats=repeats)
        for part in (cases_where(cases, is_new_N), sample_cases(cases_where(cases, ~is_new_N), _MOST_OTHERS))
    )
    floor = (1 - _MOST_LOST) * others_RN[0].mean()
    kept = [rung for rung in range(len(_RUNGS)) if (others_RN[: rung + 1].mean(axis=1) >= floor).all()]
    rung = kept[-1]
    if new_RN[rung].mean() <= new_RN[0].mean():
        return None
    of_model, of_sources = _RUNGS[rung]
    return {"model": of_model, "sources": of_sources, "num_items": int(is_new_V.sum())}


def _gains(
    cases: Cases, probabilities: Scorer, mixer: Mixer, model: str, is_new_V: np.ndarray, *, repeats: bool
) -> np.ndarray:
    """Return each case's NDCG@10 by each rung (R, N)."""
    ranks_NR = []
    for first in range(0, len(cases), _PER_BATCH):
        histories = cases.histories[first : first + _PER_BATCH]
        scored = probabilities(histories).astype(np.float64)
        for number, (history, scores_V) in enumerate(zip(histories, scored, strict=True), start=first):
            seen = np.zeros(0, dtype=np.int64) if repeats else history
            rungs = _by_rung(mixer, model, history, scores_V, is_new_V)
            ranks_NR.append([_rank(mixed_V, seen, int(cases.targets[number])) for mixed_V in rungs])
    return gains(np.array(ranks_NR, dtype=float).reshape(-1, len(_RUNGS)).T, _CUTOFF)


def _by_rung(
    mixer: Mixer, model: str, history: np.ndarray, scores_V: np.ndarray, is_new_V: np.ndarray
) -> Iterator[np.ndarray]:
    for of_model, of_sources in _RUNGS:
        new = NewItems(is_new_V, of_model, of_sources)
        added = replace(mixer, new_items={model: new}).added(model, history)
        if added is None:
            yield scores_V
        else:
            factors_V = np.where(is_new_V, of_model, 1.0)
            yield added.model_weight * factors_V * scores_V + np.bincount(added.items, added.scores, len(scores_V))


def _rank(scores_V: np.ndarray, seen: np.ndarray, label: int) -> float:
    """Return the label's mean rank among unseen items; infinite without a score."""
    shown_V = scores_V.copy()
    shown_V[seen] = -np.inf
    at = shown_V[label]
    if not at > 0:
        return np.inf
    return float((shown_V > at).sum() + ((shown_V == at).sum() + 1) / 2)
