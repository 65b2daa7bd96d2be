"""Canary analysis of simulated releases with known truth: false alarms, and the time until a worse candidate is found.

python -m benchmarks.release simulated --json OUT [--num 1000] [--processes 1]

day       equal candidates, five guards, a look each minute of a day
stages    equal candidates through the usual stages of a release, with its own guards
worse     worse candidates at 50 requests a second, a twentieth as many of each kind
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, TypeVar

from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from benchmarks.release.traffic import GUARDS, SimulatedTraffic, looks
from models.registry.canary import Canary, CanaryStage
from pipelines.experiments.verdict import Counts, Means, Outcome, verdict
from pipelines.release.counts import StageResults
from pipelines.release.guards import judge, mismatch

Found = TypeVar("Found")
_DAY = SimulatedTraffic(rate=1, minutes=1_440, num_users=5_000)
_RELEASE = SimulatedTraffic(rate=10, minutes=0, num_users=20_000)
_STAGES = (CanaryStage(0.01, 600), CanaryStage(0.05, 1_800), CanaryStage(0.25, 3_600))
"""The usual stages, with a look every minute."""
_HALF_HOUR = SimulatedTraffic(rate=50, minutes=30)
_LIMIT_S = 600
WORSE: Mapping[str, SimulatedTraffic] = {
    "20 % fewer clicks": replace(_HALF_HOUR, click_factor=0.8),
    "latency 20 % longer": replace(_HALF_HOUR, latency_factor=1.2),
    "1 % of calls fail": replace(_HALF_HOUR, added_errors=0.01),
    "20 % fewer clicks, a twentieth of the users": replace(_HALF_HOUR, click_factor=0.8, share=0.05),
    "latency 20 % longer, a twentieth of the users": replace(_HALF_HOUR, latency_factor=1.2, share=0.05),
    "1 % of calls fail, a twentieth of the users": replace(_HALF_HOUR, added_errors=0.01, share=0.05),
}
"""Scenarios by name. A click in one of ten lists, and half of the users, unless stated otherwise."""


def main() -> None:
    """Simulate, print each part, write the JSON after each."""
    parser = report_parser(__doc__ or "")
    parser.add_argument("--num", type=at_least_one, default=1_000, help="simulations of a rate (1000)")
    parser.add_argument("--processes", type=at_least_one, default=1, help="that simulate (1)")
    options = parser.parse_args()
    report = about_run("release simulated")
    day: Callable[[int], tuple[int, str] | None] = partial(found_after_s, _DAY)
    report["day"] = {"num_guards": len(GUARDS), **_alarms(day, options.num, options.processes)}
    report["stages"] = {"num_stages": len(_STAGES), **_alarms(found_worse, options.num, options.processes)}
    write_report(options.json, report)
    report["worse"] = detections(max(1, options.num // 20), options.processes)
    print({name: report[name] for name in ("day", "stages", "worse")})
    write_report(options.json, report)


def found_after_s(traffic: SimulatedTraffic, seed: int) -> tuple[int, str] | None:
    """Return the seconds until the candidate was found worse, and the reason; None if it never was."""
    for minute, counts in enumerate(looks(traffic, seed), 1):
        analysis = verdict(GUARDS, counts, share=traffic.share, elapsed_s=60 * minute)
        if analysis.outcome is Outcome.WORSE:
            return 60 * minute, analysis.reason
    return None


def found_worse(seed: int) -> str | None:
    """Simulate one release of an equal candidate; return why it was found worse, None if it was not."""
    for number, stage in enumerate(_STAGES):
        canary = Canary(version="new", salt="", stages=_STAGES, by="", at="", stage=number)
        traffic = replace(_RELEASE, share=stage.share, minutes=round(stage.hold_s / 60))
        for minute, counts in enumerate(looks(traffic, seed * len(_STAGES) + number), 1):
            users = _num_users(counts)
            seen = StageResults(
                counts=counts,
                share=stage.share,
                num_users=users,
                num_lists=(0, 0),
                stray_share=0.0,
                num_new=users,
                new_share=stage.share,
            )
            analysis = judge(canary, seen, minute * 60_000)
            if analysis.outcome is Outcome.WORSE:
                return analysis.reason
            if stopped := mismatch(canary, seen):
                return stopped
    return None


def _num_users(counts: Counts) -> tuple[int, int]:
    """Return the users with requests, of candidate and control."""
    latency = counts["latency"]
    assert isinstance(latency, Means), "a mean over all users"
    return latency.candidate.num_users, latency.control.num_users


def _alarms(find: Callable[[int], object], num: int, processes: int) -> dict[str, Any]:
    """Return how many of `num` equal candidates were found worse, and why."""
    reasons = [reason for reason in _each(find, num, processes) if reason]
    return {"num": num, "false_alarms": len(reasons), "reasons": reasons}


def _each(find: Callable[[int], Found], num: int, processes: int) -> list[Found]:
    """Return the results of `num` seeds, computed by several processes."""
    with get_context("spawn").Pool(processes) as pool:
        return pool.map(find, range(num), chunksize=10)


def detections(num: int, processes: int) -> list[dict[str, Any]]:
    """Return a row for each degradation: how many of `num` were found within ten minutes, and when."""
    rows = []
    for name, traffic in WORSE.items():
        times = [detection[0] for detection in _each(partial(found_after_s, traffic), num, processes) if detection]
        rows.append(
            {
                "name": name,
                "num": num,
                "requests_per_s": traffic.rate,
                "share": traffic.share,
                "found_within_10_minutes": sum(time_s <= _LIMIT_S for time_s in times),
                "found_within_30_minutes": len(times),
                "median_found_after_s": median(times) if times else None,
                "worst_found_after_s": max(times) if len(times) == num else None,
            }
        )
    return rows
