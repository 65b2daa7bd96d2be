"""How often a report finds a false difference, or misses the true value at a look or a sample-ratio mismatch."""

from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.experiments.traffic import Traffic, looks
from pipelines.experiments.report import MISMATCH, difference
from pipelines.experiments.sequential import mismatch_p_value
from pipelines.experiments.verdict import Means

_NUM_DAYS = 28
_NUM_LISTS = 60_000
_WEEKS = Traffic(rate=_NUM_LISTS / _NUM_DAYS / 60, minutes=_NUM_DAYS, num_users=8_000)
"""Four weeks of few lists: only the number of counts between looks matters, so a minute represents a day."""


def a_a(num: int) -> dict[str, Any]:
    """Return in how many of `num` A/A experiments clicks differed at one of the daily looks."""
    return {
        f"false_alarms_of_{num}": sum(_misses(_WEEKS, seed, 0.0) for seed in range(num)),
        "num_looks": _NUM_DAYS,
        "num_lists": _NUM_LISTS,
    }


def always_covered(num: int, factor: float = 0.9) -> dict[str, Any]:
    """Return in how many of `num` experiments with 10 % fewer clicks the interval contained the truth at every look."""
    truth = _WEEKS.clicks * (factor - 1)
    missed = sum(_misses(replace(_WEEKS, click_factor=factor), seed, truth) for seed in range(num))
    return {"num": num, "covered_share": 1 - missed / num, "num_looks": _NUM_DAYS}


def _misses(traffic: Traffic, seed: int, truth: float) -> bool:
    for counts in looks(traffic, seed):
        clicks = counts["clicks"]
        assert isinstance(clicks, Means)
        found = difference(clicks.candidate, clicks.control)
        if found.low is not None and found.high is not None and not found.low <= truth <= found.high:
            return True
    return False


def mismatches(num: int) -> dict[str, Any]:
    """Return how often 20,000 users show a sample-ratio mismatch at one of 28 looks: split 50 to 50, and 52 to 48."""
    draw = np.random.default_rng(0)
    found = {}
    for name, share in (("false_alarms", 0.5), ("found", 0.52)):
        users = draw.binomial(20_000 // _NUM_DAYS, share, (num, _NUM_DAYS)).cumsum(axis=1)
        whole = np.arange(1, _NUM_DAYS + 1) * (20_000 // _NUM_DAYS)
        found[f"{name}_of_{num}"] = sum(
            any(
                mismatch_p_value((one, all_of - one), (0.5, 0.5)) < MISMATCH
                for one, all_of in zip(row, whole, strict=True)
            )
            for row in users.tolist()
        )
    return found
