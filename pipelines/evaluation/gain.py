"""The gain of one model over another on the same users, by slice: paired, so that what is hard for both counts for neither. Pure; numpy only.

A slice is a share of the test cases, by what is known of the user (history length, time since the last event) or of the label (how often training
saw it). A gain whose interval holds 0, or of too few cases, is not shown.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.data.examples import Cases
from pipelines.evaluation.metrics import interval

MIN_CASES = 30
"""Of fewer cases the bootstrap knows too little: of a single one it has no width at all."""
_LENGTHS = (0, 10, 50, 200)
"""From how many known items on a history belongs to the next slice."""
_HEAD, _TORSO = 0.5, 0.9
"""The most frequent items with half of all training events are the head; with those up to nine tenths the torso; the rest is the tail."""
SHELVES = ("head", "torso", "tail", "new")
"""An item's place by its training events; new: it has none."""
_HOUR_S, _DAY_S = 3_600.0, 86_400.0
_IDLE = {
    "idle under 1 hour": (0.0, _HOUR_S),
    "idle 1-24 hours": (_HOUR_S, _DAY_S),
    "idle 1-7 days": (_DAY_S, 7 * _DAY_S),
    "idle 7 days and longer": (7 * _DAY_S, np.inf),
}
"""By slice, the time from the user's last event to the label in seconds: from, and below."""
HISTORIES = {
    f"history {first} and longer" if after is None else f"history {first}-{after - 1}": (first, after and after - 1)
    for first, after in zip(_LENGTHS, (*_LENGTHS[1:], None), strict=True)
}
"""By slice, the first and the last length of its histories; None: no last."""


def slices_of(cases: Cases, popularity: np.ndarray) -> dict[str, np.ndarray]:
    """Return, by slice, which cases belong to it (bool). `popularity` is each item's number of training events. Empty slices are left out."""
    lengths = np.array([len(history) for history in cases.histories])
    named = {"all": np.ones(len(cases), dtype=bool)}
    for name, (first, last) in HISTORIES.items():
        named[name] = (lengths >= first) & (True if last is None else lengths <= last)
    for name, (least_s, below_s) in _IDLE.items():
        named[name] = (cases.idle_s >= least_s) & (cases.idle_s < below_s)  # not so where it is NaN
    shelves = shelf_of(popularity)[cases.targets]
    for number, name in enumerate(SHELVES):
        named[f"item {name}"] = shelves == number
    return {name: members for name, members in named.items() if members.any()}


def gain_by_slice(llm: np.ndarray, student: np.ndarray, slices: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return rows {slice, history, num_cases, llm_ndcg, student_ndcg, llm_minus_student, low, high}: means of each case's NDCG, and of its difference with the 95 % paired bootstrap interval.

    `history` is the slice's first and last length (None: no last) where it is one of history lengths, else None.
    """
    rows = []
    for name, members in slices.items():
        difference = llm[members] - student[members]
        low, high = interval(difference, seed=0)
        means = {"llm_ndcg": float(llm[members].mean()), "student_ndcg": float(student[members].mean())}
        gain = {"llm_minus_student": float(difference.mean()), "low": low, "high": high}
        about = {
            "slice": name,
            "history": list(HISTORIES[name]) if name in HISTORIES else None,
            "num_cases": int(members.sum()),
        }
        rows.append({**about, **means, **gain})
    return rows


def histories_that_pay(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the slices by length of history in which the decoder is shown to be better: what a request's routing may depend on.

    Other slices go by the label, or by a time that no request is routed by.
    """
    return [row["slice"] for row in rows if row["slice"] in HISTORIES and _is_shown(row)]


def llm_pays(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int | None]]:
    """Return the same as lengths of history, (first, last)."""
    return [HISTORIES[name] for name in histories_that_pay(rows)]


def describe_gain(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence: in which slices the decoder is better than its student by more than the interval."""
    better = [f"{row['slice']} (+{row['llm_minus_student']:.4f})" for row in rows if _is_shown(row)]
    found = ", ".join(better) if better else f"none of {len(rows)} slices"
    return f"the decoder's NDCG@10 is above its student's, beyond the 95 % interval, in: {found}"


def _is_shown(row: Mapping[str, Any]) -> bool:
    return bool(row["low"] > 0 and row["num_cases"] >= MIN_CASES)


def shelf_of(popularity: np.ndarray) -> np.ndarray:
    """Return each item's number in `SHELVES` by its number of training events. Ties by index."""
    order = np.argsort(-popularity, kind="stable")
    before = np.cumsum(popularity[order]) - popularity[order]
    share = before / max(1.0, float(popularity.sum()))
    shelves = np.empty(len(popularity), dtype=np.int64)
    shelves[order] = (share >= _HEAD).astype(np.int64) + (share >= _TORSO)
    shelves[popularity == 0] = 3
    return shelves
