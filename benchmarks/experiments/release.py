"""How often canary analysis finds an equal candidate worse within a day, and how soon it finds a worse candidate."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, TypeVar

from benchmarks.experiments.traffic import GUARDS, Traffic, looks
from pipelines.experiments.verdict import Outcome, verdict

Found = TypeVar("Found")
DAY = Traffic(rate=1, minutes=1_440, num_users=5_000)
_HALF_HOUR = Traffic(rate=50, minutes=30)
_LIMIT_S = 600
WORSE: Mapping[str, Traffic] = {
    "20 % fewer clicks": replace(_HALF_HOUR, click_factor=0.8),
    "latency 20 % longer": replace(_HALF_HOUR, latency_factor=1.2),
    "1 % of calls fail": replace(_HALF_HOUR, added_errors=0.01),
    "20 % fewer clicks, a twentieth of the users": replace(_HALF_HOUR, click_factor=0.8, share=0.05),
    "latency 20 % longer, a twentieth of the users": replace(_HALF_HOUR, latency_factor=1.2, share=0.05),
    "1 % of calls fail, a twentieth of the users": replace(_HALF_HOUR, added_errors=0.01, share=0.05),
}
"""Scenarios by name. A click in one of ten lists, and half of the users, unless stated otherwise."""


def found_after_s(traffic: Traffic, seed: int) -> tuple[int, str] | None:
    """Return the seconds until the candidate was found worse, and the reason; None if it never was."""
    for minute, counts in enumerate(looks(traffic, seed), 1):
        found = verdict(GUARDS, counts, share=traffic.share, elapsed_s=60 * minute)
        if found.outcome is Outcome.WORSE:
            return 60 * minute, found.reason
    return None


def false_alarms(num: int, processes: int, traffic: Traffic = DAY) -> dict[str, Any]:
    """Return how many equal candidates were found worse, with the reasons."""
    found = [one for one in each(partial(found_after_s, traffic), num, processes) if one]
    return {
        f"false_alarms_of_{num}": len(found),
        "requests_per_s": traffic.rate,
        "num_looks": traffic.minutes,
        "num_guards": len(GUARDS),
        "reasons": [reason for _, reason in found],
    }


def each(find: Callable[[int], Found], num: int, processes: int) -> list[Found]:
    """Return the results of `num` seeds, computed by several processes."""
    with get_context("spawn").Pool(processes) as pool:
        return pool.map(find, range(num), chunksize=10)


def detections(num: int, processes: int) -> list[dict[str, Any]]:
    """Return a row for each degradation: how many of `num` were found within ten minutes, and when."""
    rows = []
    for name, traffic in WORSE.items():
        times = [one[0] for one in each(partial(found_after_s, traffic), num, processes) if one]
        rows.append(
            {
                "name": name,
                "num": num,
                "requests_per_s": traffic.rate,
                "share": traffic.share,
                "found_within_10_minutes": sum(one <= _LIMIT_S for one in times),
                "found_within_30_minutes": len(times),
                "median_found_after_s": median(times) if times else None,
                "worst_found_after_s": max(times) if len(times) == num else None,
            }
        )
    return rows
