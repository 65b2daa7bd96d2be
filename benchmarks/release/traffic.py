"""Release traffic with known truth, analysed minute by minute.

Users return, and differ in activity, taste and speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipelines.experiments.user_sums import UserSums
from pipelines.experiments.verdict import Affected, Counts, Guard, Means

GUARDS = (
    Guard(name="errors", effect=0.5),
    Guard(name="deadline_misses", effect=0.5),
    Guard(name="latency_ms", effect=0.1),
    Guard(name="clicks", higher_is_worse=False, effect=0.1, weight=4, is_objective=True),
    Guard(name="value", higher_is_worse=False, effect=0.2),
)
"""Without budgets: guards without tolerance have the most false alarms."""
_DEADLINE_MS = 200.0
_CLICKS = 0.1
"""Clicks per list of the control."""
_MOST_VALUE = 200.0
"""Values are clipped here: the test of a mean needs bounded values."""
_MEANS = ("latency_ms", "clicks", "value", "variety")
_AFFECTED = ("errors", "deadline_misses", "popular", "refusals", "missing")
_TIERS = {"llm": 0.2, "student": 0.6, "precomputed": 0.2}
"""The fraction of lists of each tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTraffic:
    """The traffic, and the candidate's effect on it.

    Args:
        rate: Requests a second.
        minutes: Duration; the analysis looks at the counts after each minute.
        share: The candidate's traffic fraction.
        num_users: Number of users; each request is drawn from them by activity.
        click_factor: The candidate's clicks over the control's.
        latency_factor: The candidate's latency over the control's.
        added_errors: Additional fraction of the candidate's calls that fail.
    """

    rate: float
    minutes: int
    share: float = 0.5
    num_users: int = 10_000
    click_factor: float = 1.0
    latency_factor: float = 1.0
    added_errors: float = 0.0


def looks(traffic: SimulatedTraffic, seed: int) -> Iterator[Counts]:
    """Yield the cumulative counts after each minute, for `GUARDS` and for the guards of a release."""
    draw = np.random.default_rng(seed)
    num, users = int(draw.poisson(traffic.rate * 60 * traffic.minutes)), traffic.num_users
    minute = np.sort(draw.integers(0, traffic.minutes, num))
    activity = np.cumsum(draw.lognormal(0, 1, users))
    user = np.searchsorted(activity, draw.random(num) * activity[-1])
    user, minute = (column[np.argsort(user, kind="stable")] for column in (user, minute))  # by user, then time
    is_candidate = (draw.random(users) < traffic.share)[user]
    taste, speed = (draw.lognormal(-(sigma**2) / 2, sigma, users)[user] for sigma in (0.5, 0.3))
    wanted = np.minimum(0.9, _CLICKS * taste * np.where(is_candidate, traffic.click_factor, 1.0))
    clicks = (draw.random(num) < wanted).astype(float)
    bought = clicks * (draw.random(num) < 0.2)
    latency = 20 * speed * draw.lognormal(0, 0.5, num) * np.where(draw.random(num) < 0.01, 6.0, 1.0)
    latency *= np.where(is_candidate, traffic.latency_factor, 1.0)
    failing = 0.0005 + np.where(is_candidate, traffic.added_errors, 0.0)
    values = {
        "latency_ms": np.minimum(latency, _DEADLINE_MS),
        "clicks": clicks,
        "value": np.minimum(bought * 10 * (1 + draw.pareto(1.5, num)), _MOST_VALUE),
    }
    happened = {"errors": draw.random(num) < failing, "deadline_misses": latency > _DEADLINE_MS}
    values["variety"] = np.clip(0.7 * draw.lognormal(0, 0.1, users)[user] * draw.lognormal(0, 0.2, num), 0, 1)
    happened["popular"] = draw.random(num) < 0.01
    happened["refusals"], happened["missing"] = draw.random(num) < 0.002, draw.random(num) < 0.001
    tier = draw.choice(list(_TIERS), num, p=list(_TIERS.values()))
    sums = {name: _sums(user, is_candidate, minute, values[name], traffic.minutes) for name in _MEANS}
    affected = {name: _affected(user, is_candidate, minute, happened[name], traffic.minutes) for name in _AFFECTED}
    for name in _TIERS:
        own = tier == name
        of_tier = (user[own], is_candidate[own], minute[own], values["latency_ms"][own])
        sums[f"latency:{name}"] = _sums(*of_tier, traffic.minutes)
    sums["latency"] = sums["latency_ms"]
    in_lists = {name: _sums(user, is_candidate, minute, happened[name] * 1.0, traffic.minutes) for name in _AFFECTED}
    for now in range(traffic.minutes):
        yield {
            **{name: _affected_until(affected[name][now], in_lists[name][now]) for name in _AFFECTED},
            **{name: _means(by_minute[now]) for name, by_minute in sums.items()},
        }


def _sums(
    user: np.ndarray, is_candidate: np.ndarray, minute: np.ndarray, value: np.ndarray, minutes: int
) -> list[list[list[float]]]:
    """Return the fields of `UserSums` so far, by minute and by candidate and control. Rows are by user, then time."""
    is_first = np.diff(user, prepend=-1) != 0
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(user)), 0))
    before = np.arange(len(user)) - first
    summed = np.cumsum(value) - value
    total = summed - summed[first]
    grown = (
        is_first,
        value,
        np.ones(len(user)),
        2 * total * value + value**2,
        total + (before + 1) * value,
        2 * before + 1,
    )
    return _by_minute(grown, is_candidate, minute, minutes)


def _affected_until(both: list[int], lists: list[list[float]]) -> Affected:
    return Affected(both[0], both[1], _means(lists))


def _means(both: list[list[float]]) -> Means:
    candidate, control = (UserSums(int(sums[0]), *sums[1:]) for sums in both)
    return Means(candidate, control)


def _affected(
    user: np.ndarray, is_candidate: np.ndarray, minute: np.ndarray, happened: np.ndarray, minutes: int
) -> list[list[int]]:
    rows = np.flatnonzero(happened)
    rows = rows[np.diff(user[rows], prepend=-1) != 0]  # the first row of each user
    counted = _by_minute((np.ones(len(rows)),), is_candidate[rows], minute[rows], minutes)
    return [[int(sums[0]) for sums in both] for both in counted]


def _by_minute(
    columns: tuple[np.ndarray, ...], is_candidate: np.ndarray, minute: np.ndarray, minutes: int
) -> list[list[list[float]]]:
    cell = 2 * minute + ~is_candidate
    grown = np.stack([np.bincount(cell, column, 2 * minutes) for column in columns], axis=-1)
    sums: list[list[list[float]]] = grown.reshape(minutes, 2, len(columns)).cumsum(axis=0).tolist()
    return sums
