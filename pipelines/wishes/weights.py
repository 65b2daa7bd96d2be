"""Chooses what each part of a reading counts: the weights with the highest NDCG@10 of validation labels.

Each written wish is ranked with its user's probabilities. Weights are tried one after another, in two rounds; a part
whose gain is not shown keeps its default, or none if it harms. Of a large catalogue, a wish's label competes with the
items that any part or the model ranks highest.

Shape suffix: R items that compete for one wish, the label first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from models.wishes.mixing import WishMix
from models.wishes.reader import Parts, Reader, Weights
from pipelines.data.examples import Cases
from pipelines.runner.stage import Progress
from pipelines.scoring.metrics import Scorer, gains, interval
from pipelines.wishes.generate import Wish

_FACTORS = (0.0, 0.25, 0.5, 0.7, 1.4, 2.0, 3.0)
_PERSONAL = (0.5, 0.7, 1.4)
_NUM_COMPETING = 4_000
_NUM_BEST = 300
_ROUNDS = 2
_BATCH = 32
_FIXED = frozenset({"earlier"})


@dataclass(frozen=True, slots=True, eq=False)
class ReadCase:
    """A wish's label among the items that compete with it: the model's log-probabilities, and the parts (R,)."""

    kind: str
    logs_R: np.ndarray
    parts: dict[str, np.ndarray]

    def rank(self, weights: Weights) -> float:
        """Return the label's rank, from 1."""
        scores_R: np.ndarray = np.float32(weights.personal) * self.logs_R
        for name, part_R in self.parts.items():
            scores_R = scores_R + np.float32(getattr(weights, name)) * part_R
        return 1 + float((scores_R[1:] > scores_R[0]).sum()) + 0.5 * float((scores_R[1:] == scores_R[0]).sum())


def read_cases_of(
    reader: Reader, wishes: Sequence[Wish], cases: Cases, scorer: Scorer, mix: WishMix, progress: Progress
) -> list[ReadCase]:
    """Read each wish and score its user. Seen and excluded items do not compete."""
    read_cases: list[ReadCase] = []
    of_case: dict[int, list[Wish]] = {}
    for wish in wishes:
        of_case.setdefault(wish.case, []).append(wish)
    numbers = sorted(of_case, key=lambda number: len(cases.histories[number]))
    for start in range(0, len(numbers), _BATCH):
        batch = numbers[start : start + _BATCH]
        scores = scorer([cases.histories[number] for number in batch])
        for number, probabilities_V in zip(batch, scores, strict=True):
            logs_V = mix.scores([(np.arange(len(probabilities_V)), probabilities_V)], None, len(probabilities_V))
            label, history = int(cases.targets[number]), cases.histories[number]
            for wish in of_case[number]:
                parts = reader.parts(wish.text, wish.session)
                read_cases.append(_compete(wish.kind, logs_V, parts, label, history))
        progress(len(read_cases), len(wishes), "wishes read")
    return read_cases


def _compete(kind: str, logs_V: np.ndarray, parts: Parts, label: int, history: np.ndarray) -> ReadCase:
    competes_V = np.ones(len(logs_V), dtype=bool)
    competes_V[history] = False
    is_lost = parts.excluded is not None and bool(parts.excluded[label])
    if parts.excluded is not None:
        competes_V &= ~parts.excluded
    competes_V[label] = False
    if len(logs_V) > _NUM_COMPETING:
        ranked = [logs_V, *(part for name, part in parts.scores.items() if not name.startswith("less"))]
        best = np.unique(np.concatenate([np.argpartition(-scores_V, _NUM_BEST)[:_NUM_BEST] for scores_V in ranked]))
        items_R = best[competes_V[best]]
    else:
        items_R = np.flatnonzero(competes_V)
    items_R = np.concatenate([[label], items_R])
    logs_R = logs_V[items_R].copy()
    logs_R[0] = -np.inf if is_lost else logs_R[0]
    return ReadCase(kind, logs_R, {name: part_V[items_R] for name, part_V in parts.scores.items()})


def choose_weights(read: Sequence[ReadCase], progress: Progress) -> tuple[Weights, dict[str, Any]]:
    """Return the weights, and {unread, read: NDCG@10 by kind; num_wishes}."""
    chosen = Weights()
    names = [field.name for field in fields(Weights) if field.name not in _FIXED]
    for done in range(_ROUNDS * len(names)):
        name = names[done % len(names)]
        concerned = [case for case in read if name == "personal" or name in case.parts]
        if concerned:
            chosen = _improved(chosen, name, concerned)
        progress(done + 1, _ROUNDS * len(names), f"weight of {name}")
    return chosen, {"num_wishes": len(read), "unread": _by_kind(read, None), "read": _by_kind(read, chosen)}


def _improved(weights: Weights, name: str, read: Sequence[ReadCase]) -> Weights:
    """Return the weights with another weight of this part where its gain is shown."""
    before_N, best = _gains(read, weights), weights
    default, highest = getattr(weights, name), 0.0
    for factor in _PERSONAL if name == "personal" else _FACTORS:
        tried = replace(weights, **{name: default * factor})
        gained_N = _gains(read, tried) - before_N
        if gained_N.mean() > highest and interval(gained_N, seed=0)[0] > 0:
            highest, best = float(gained_N.mean()), tried
    return best


def _gains(read: Sequence[ReadCase], weights: Weights) -> np.ndarray:
    return gains(np.array([case.rank(weights) for case in read]), 10)


_UNREAD = Weights(**{field.name: 0.0 for field in fields(Weights) if field.name not in ("earlier", "personal")})


def _by_kind(read: Sequence[ReadCase], weights: Weights | None) -> dict[str, float]:
    kinds = sorted({case.kind for case in read})
    of_kind = {kind: [case for case in read if case.kind == kind] for kind in kinds} | {"all": list(read)}
    return {kind: float(_gains(cases, weights or _UNREAD).mean()) for kind, cases in of_kind.items() if cases}
