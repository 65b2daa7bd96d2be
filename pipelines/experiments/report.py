"""The report of an experiment: each variant's difference to the control, with intervals valid at every look. Pure.

The report may be read every day, and may end the experiment on any day. Clicks decide; the other metrics, each at the
same level, explain. Segments are many simultaneous tests of clicks: Holm's method corrects their p-values under any
dependence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import polars as pl

from pipelines.experiments.lists import METRICS, Lists, sums_by_day
from pipelines.experiments.sequential import holm, interval, mismatch_p_value, p_value
from pipelines.experiments.user_sums import UserSums, difference_variance
from services.errors import InvalidRequest

ALPHA = 0.05
MISMATCH = 0.01
"""Below this p-value users are not divided as intended, and no difference can be trusted."""
EFFECT = 0.05
MIN_USERS = 100
"""Minimum users of each variant, for a difference or a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A variant minus the control, in the metric's unit, with the interval over all looks and its p-value.

    None: too few users.
    """

    estimate: float | None
    low: float | None
    high: float | None
    p_value: float


_UNKNOWN = Difference(estimate=None, low=None, high=None, p_value=1.0)


def difference(candidate: UserSums, control: UserSums, effect: float) -> Difference:
    """Comparison of two variants.

    `effect` is the relative effect, as a fraction of the control's mean, that the test targets.
    """
    variance = difference_variance(candidate, control)
    scale = effect * abs(control.mean) if control.exposure else 0.0
    if min(candidate.num_users, control.num_users) < MIN_USERS or not 0 < variance < math.inf or not scale:
        return _UNKNOWN
    estimate = candidate.mean - control.mean
    low, high = interval(estimate, variance, scale, ALPHA)
    return Difference(estimate=estimate, low=low, high=high, p_value=p_value(estimate, variance, scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentReportOptions:
    """Options of a comparison.

    Args:
        control: The baseline variant; empty: `control`, else the first by name.
        shares: Traffic fraction by variant; empty: equal fractions.
        segments: Columns that divide the users.
        effect: Relative effect, as a fraction of the control's value, with the highest power of the tests.
    """

    control: str = ""
    shares: Mapping[str, float] | None = None
    segments: Sequence[str] = ()
    effect: float = EFFECT


def report(lists: Lists, options: ExperimentReportOptions) -> dict[str, Any]:
    """Return the report as plain values: {control, days, variants, differences, segments, mismatch, notes}.

    Raises:
        InvalidRequest: The control or a fraction names no variant of the table, or the table has a single variant.
    """
    variants = lists.variants
    control = options.control or ("control" if "control" in variants else variants[0])
    if control not in variants:
        raise InvalidRequest(
            "control", f"{control} is not a variant of the table", f"give one of {', '.join(variants)}"
        )
    if len(variants) < 2:
        raise InvalidRequest(
            "table", f"has one variant, {control}", "compare two variants, or give --aa to test only the method"
        )
    sums = {name: sums_by_day(lists, name) for name in METRICS}
    others = [name for name in variants if name != control]
    return {
        "control": control,
        "days": list(lists.days),
        "alpha": ALPHA,
        "variants": [_variant(lists, name, sums) for name in variants],
        "differences": [_difference(sums, metric, name, control, options) for metric in METRICS for name in others],
        "segments": _segments(lists, others, control, options),
        "mismatch": _mismatch(lists, options.shares, variants),
        "notes": _notes(lists),
    }


def _variant(lists: Lists, name: str, sums: Mapping[str, Sequence[Mapping[str, UserSums]]]) -> dict[str, Any]:
    tiers = lists.tiers.filter(pl.col("variant") == name)
    whole = int(tiers["lists"].sum())
    last = {metric: days[-1].get(name, UserSums()) for metric, days in sums.items()}
    return {
        "variant": name,
        "num_users": last["clicks"].num_users,
        "num_impressions": whole,
        **{metric: None if math.isnan(own.mean) else own.mean for metric, own in last.items()},
        "tiers": {tier or "none": count / whole for tier, count in tiers.select("tier", "lists").iter_rows()},
    }


def _difference(
    sums: Mapping[str, Sequence[Mapping[str, UserSums]]],
    metric: str,
    name: str,
    control: str,
    options: ExperimentReportOptions,
) -> dict[str, Any]:
    """Return the last look, the p-value of all looks together, and the interval of each day."""
    looks = [
        difference(day.get(name, UserSums()), day.get(control, UserSums()), options.effect) for day in sums[metric]
    ]
    last, mean = looks[-1], sums[metric][-1].get(control, UserSums()).mean
    relative = {
        f"{key}_share": None if (value := getattr(last, key)) is None else value / mean
        for key in ("estimate", "low", "high")
    }
    least = list(accumulate((look.p_value for look in looks), min))[-1]
    daily = [[look.estimate, look.low, look.high] for look in looks]
    return {"metric": metric, "variant": name, **asdict(last), **relative, "p_value": least, "by_day": daily}


def _segments(
    lists: Lists, others: Sequence[str], control: str, options: ExperimentReportOptions
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for column in options.segments:
        for (value,), part in lists.users.group_by(column, maintain_order=True):
            days = sums_by_day(lists, "clicks", part)
            for name in others:
                looks = [
                    difference(day.get(name, UserSums()), day.get(control, UserSums()), options.effect) for day in days
                ]
                figures = asdict(looks[-1]) | {"p_value": min(look.p_value for look in looks)}
                num_users = min(days[-1].get(variant, UserSums()).num_users for variant in (name, control))
                rows.append({"segment": f"{column}={value}", "variant": name, "num_users": num_users, **figures})
    for row, corrected in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["holm_p_value"] = corrected
    return sorted(rows, key=lambda row: (row["segment"], row["variant"]))


def _mismatch(lists: Lists, shares: Mapping[str, float] | None, variants: Sequence[str]) -> dict[str, Any]:
    expected = dict(shares) if shares else dict.fromkeys(variants, 1.0)
    if expected.keys() != set(variants):
        raise InvalidRequest("shares", f"are of {', '.join(expected)}", f"give one for each of {', '.join(variants)}")
    if not all(0 < share < math.inf for share in expected.values()):
        raise InvalidRequest("shares", "are not all above 0", "give for example control=0.5,fresh=0.5")
    users = [lists.users.filter(pl.col("variant") == name)["user"].n_unique() for name in variants]
    whole = sum(expected.values())
    mismatch_p = mismatch_p_value(users, [expected[name] / whole for name in variants])
    return {
        "users": dict(zip(variants, users, strict=True)),
        "shares": {name: expected[name] / whole for name in variants},
        "p_value": mismatch_p,
        "is_mismatch": mismatch_p < MISMATCH,
    }


def _notes(lists: Lists) -> list[str]:
    """Return notes that a reader of the data needs, a sentence each."""
    notes = []
    several = lists.users.group_by("user").agg(pl.col("variant").n_unique()).filter(pl.col("variant") > 1).height
    if several:
        notes.append(f"{several} users were in several variants and count in each: the shares or the hash changed")
    if lists.num_outside:
        notes.append(f"{lists.num_outside} lists without a variant are excluded")
    cuts = {"values of an impression": lists.cuts["value"], "latencies": lists.cuts["elapsed_ms"]}
    notes += [f"{name} above {cut:g} count as {cut:g}" for name, cut in cuts.items() if cut]
    return notes


def a_a(lists: Lists, variant: str, num: int, seed: int, effect: float = EFFECT) -> dict[str, Any]:
    """Divide one variant's users at random in halves, `num` times, look each day, and count differences by metric.

    The halves do not differ, so at most `ALPHA` of them should show a difference.
    """
    draw = np.random.default_rng(seed)
    rows = lists.users.filter(pl.col("variant") == variant)
    number = int(rows["user"].max()) + 1 if rows.height else 0  # type: ignore[arg-type]
    users = np.unique(rows["user"].to_numpy())
    if len(users) < 2 * MIN_USERS:
        raise InvalidRequest("aa", f"{variant} has {len(users)} users", f"take a variant with {2 * MIN_USERS} or more")
    false_alarms = dict.fromkeys(METRICS, 0)
    days = {metric: _with_users(lists, metric, rows) for metric in METRICS}
    for _ in range(num):
        is_first = draw.random(number) < 0.5
        for metric, looks in days.items():
            false_alarms[metric] += any(
                _differ(totals, exposures, is_first[who], effect) for who, totals, exposures in looks
            )
    return {"variant": variant, "num_splits": num, "num_looks": len(lists.days), "false_alarms": false_alarms}


def _with_users(lists: Lists, metric: str, rows: pl.DataFrame) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return by day the users with exposure so far, their totals and their exposures."""
    names = METRICS[metric]
    looks = []
    for day in range(len(lists.days)):
        so_far = rows.filter(pl.col("day") <= day).group_by("user").agg(pl.col(list(dict.fromkeys(names))).sum())
        so_far = so_far.filter(pl.col(names[1]) > 0)
        totals, exposures = (so_far[name].to_numpy().astype(float) for name in names)
        looks.append((so_far["user"].to_numpy(), totals, exposures))
    return looks


def _differ(totals: np.ndarray, exposures: np.ndarray, is_first: np.ndarray, effect: float) -> bool:
    first, other = (UserSums.of(totals[half], exposures[half]) for half in (is_first, ~is_first))
    estimate = difference(first, other, effect)
    return estimate.low is not None and estimate.high is not None and not estimate.low <= 0 <= estimate.high
