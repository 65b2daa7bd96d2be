"""How often any guard of a release, at any look of any stage, finds an equal candidate worse or its users missing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.experiments.release import each
from benchmarks.experiments.traffic import Traffic, looks
from models.canary import Canary, CanaryStage
from pipelines.experiments.verdict import Counts, Means, Outcome
from pipelines.release.counts import StageResults
from pipelines.release.guards import judge, mismatch

STAGES = (CanaryStage(0.01, 600), CanaryStage(0.05, 1_800), CanaryStage(0.25, 3_600))
"""The usual stages, with a look every minute."""
_TRAFFIC = Traffic(rate=10, minutes=0, num_users=20_000)


def found_worse(seed: int) -> str | None:
    """Simulate one release of an equal candidate; return why it was found worse, None if it was not."""
    for number, stage in enumerate(STAGES):
        canary = Canary(version="new", salt="", stages=STAGES, by="", at="", stage=number)
        traffic = replace(_TRAFFIC, share=stage.share, minutes=round(stage.hold_s / 60))
        for minute, counts in enumerate(looks(traffic, seed * len(STAGES) + number), 1):
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
            found = judge(canary, seen, minute * 60_000)
            if found.outcome is Outcome.WORSE:
                return found.reason
            if stopped := mismatch(canary, seen):
                return stopped
    return None


def _num_users(counts: Counts) -> tuple[int, int]:
    """Return the users with requests, of candidate and control."""
    latency = counts["latency"]
    assert isinstance(latency, Means), "a mean over all users"
    return latency.candidate.num_users, latency.control.num_users


def false_alarms(num: int, processes: int) -> Mapping[str, Any]:
    """Return how many of `num` equal candidates were found worse, and why."""
    reasons = [one for one in each(found_worse, num, processes) if one]
    return {
        f"false_alarms_of_{num}": len(reasons),
        "num_stages": len(STAGES),
        "num_looks": round(sum(stage.hold_s for stage in STAGES) / 60),
        "requests_per_s": _TRAFFIC.rate,
        "reasons": reasons,
    }
