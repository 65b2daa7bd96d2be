"""The paired gain of one model over another on the same users, by slice. Pure; numpy only.

A slice is a subset of the test cases, by properties of the user (history length, time since the last event) or of the
label (its number of training events).

Routing may depend only on slices by history length. The decoder pays in a slice if its gain in NDCG@10 exceeds a price
for each millisecond of processor time. Validation labels choose the slices where the net gain is above 0; test labels
then test these slices by Holm's method (1979). If the decoder has no net gain anywhere, at most 2.5 % of runs route any
slice to it, for any number of slices.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtr

from pipelines.data.examples import Cases
from pipelines.scoring.metrics import interval

MIN_CASES = 30
"""Of fewer cases the bootstrap knows too little: of a single one it has no width at all."""
_LEVEL = 0.025
"""Family-wise level of the tests over all slices."""
_LENGTHS = (0, 10, 50, 200)
"""From how many known items on a history belongs to the next slice."""
_HEAD, _TORSO = 0.5, 0.9
"""Head: the most frequent items with half of all training events; torso: the next up to nine tenths; then tail."""
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


def served_as(model: str, known: Container[str]) -> str:
    """Return the name under which a model's scores as served are known: those of its mix, if it has one."""
    return mixed if (mixed := f"mixed_{model}") in known else model


def slices_of(cases: Cases, popularity: np.ndarray) -> dict[str, np.ndarray]:
    """Return a mask over the cases for each non-empty slice. `popularity` is each item's number of training events."""
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
    """Return rows {slice, history, num_cases, llm_ndcg, student_ndcg, llm_minus_student, low, high, std_error}.

    NDCG is the mean over cases; low and high are the 95 % paired bootstrap interval of the difference.


    `history` is the slice's first and last length (None: no last) where it is one of history lengths, else None.
    """
    rows = []
    for name, members in slices.items():
        difference = llm[members] - student[members]
        low, high = interval(difference, seed=0)
        means = {"llm_ndcg": float(llm[members].mean()), "student_ndcg": float(student[members].mean())}
        std_error = float(difference.std(ddof=1) / len(difference) ** 0.5) if len(difference) > 1 else 0.0
        gain = {"llm_minus_student": float(difference.mean()), "low": low, "high": high, "std_error": std_error}
        about = {
            "slice": name,
            "history": list(HISTORIES[name]) if name in HISTORIES else None,
            "num_cases": int(members.sum()),
        }
        rows.append({**about, **means, **gain})
    return rows


def with_cost(
    rows: Sequence[Mapping[str, Any]], validated: Sequence[Mapping[str, Any]], decoder_ms: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Add `decoder_ms` and `valid_llm_minus_student` (None: too few labels) to the rows of history lengths.

    `validated` are the rows of the validation labels.
    """
    chosen_by = {row["slice"]: row["llm_minus_student"] for row in validated if row["num_cases"] >= MIN_CASES}
    return [
        {**row, "decoder_ms": decoder_ms[name], "valid_llm_minus_student": chosen_by.get(name)}
        if (name := row["slice"]) in HISTORIES
        else dict(row)
        for row in rows
    ]


def weigh(rows: Sequence[Mapping[str, Any]], price_ndcg_per_ms: float) -> list[dict[str, Any]]:
    """Return {slice, decoder_ms, valid_net, net, p_value, pays} of each slice by history length.

    Net is the gain in NDCG less the price of the decoder's time; the p-value is Holm's.


    `valid_net` and `p_value` are None where there are too few cases; `p_value` also where validation did not choose the
    slice.
    """
    weighed = []
    for row in (row for row in rows if row["slice"] in HISTORIES):
        cost, valid = price_ndcg_per_ms * row["decoder_ms"], row["valid_llm_minus_student"]
        valid_net, net = None if valid is None else valid - cost, row["llm_minus_student"] - cost
        is_chosen = valid_net is not None and valid_net > 0 and row["num_cases"] >= MIN_CASES
        p_value = _p_value(net, row["std_error"], row["num_cases"]) if is_chosen else None
        figures = {"decoder_ms": row["decoder_ms"], "valid_net": valid_net, "net": net, "p_value": p_value}
        weighed.append({"slice": row["slice"], **figures})
    tested, least = sorted((row for row in weighed if row["p_value"] is not None), key=lambda row: row["p_value"]), 0.0
    for before, row in enumerate(tested):
        row["p_value"] = least = min(1.0, max(least, row["p_value"] * (len(tested) - before)))
    return [{**row, "pays": row["p_value"] is not None and row["p_value"] <= _LEVEL} for row in weighed]


def histories_that_pay(rows: Sequence[Mapping[str, Any]], price_ndcg_per_ms: float) -> list[str]:
    """Return the slices by history length with a significant gain after the price of the decoder's time."""
    return [row["slice"] for row in weigh(rows, price_ndcg_per_ms) if row["pays"]]


def llm_pays(rows: Sequence[Mapping[str, Any]], price_ndcg_per_ms: float) -> list[tuple[int, int | None]]:
    """Return the same as lengths of history, (first, last)."""
    return [HISTORIES[name] for name in histories_that_pay(rows, price_ndcg_per_ms)]


def describe_gain(rows: Sequence[Mapping[str, Any]], price_ndcg_per_ms: float) -> str:
    """Return a sentence on the history lengths at which the decoder is worth its time."""
    better = [f"{row['slice']} ({row['net']:+.4f})" for row in weigh(rows, price_ndcg_per_ms) if row["pays"]]
    slices = ", ".join(better) if better else "none"
    return (
        f"the decoder's gain in NDCG@10, less {price_ndcg_per_ms:g} for each millisecond, is significant for: {slices}"
    )


def _p_value(net: float, std_error: float, num_cases: int) -> float:
    """Return the p-value of a t-test that the mean is above 0."""
    if not std_error:
        return 0.0 if net > 0 else 1.0
    return float(stdtr(num_cases - 1, -net / std_error))


def shelf_of(popularity: np.ndarray) -> np.ndarray:
    """Return each item's number in `SHELVES` by its number of training events. Ties by index."""
    order = np.argsort(-popularity, kind="stable")
    before = np.cumsum(popularity[order]) - popularity[order]
    share = before / max(1.0, float(popularity.sum()))
    shelves = np.empty(len(popularity), dtype=np.int64)
    shelves[order] = (share >= _HEAD).astype(np.int64) + (share >= _TORSO)
    shelves[popularity == 0] = 3
    return shelves
