"""Scores of a run of requests: availability, deadlines, tiers, quality-weighted goodput, recovery. Pure arithmetic."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.load.open_loop import Shot, percentile

DEGRADED = frozenset(
    {
        "llm_overloaded",
        "llm_too_slow",
        "llm_late",
        "llm_unavailable",
        "llm_failed",
        "bundle_mismatch",
        "model_loading",
        "features_unavailable",
        "student_failed",
        "shed",
    }
)
"""Reasons that a healthy stack under its usual load does not return."""

_BIN_S = 0.5
_CALM_BINS = 4
_TOLERANCE = 0.1


def tier_weights(report: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Return each tier's weight from a bundle's evaluation report: its NDCG@10 relative to the LLM's.

    Precomputed lists have the LLM's weight.
    """
    ndcg = {model: measured["ndcg@10"] for model, measured in report["metrics"].items()}
    llm = ndcg["decoder"]
    return {"llm": 1.0, "precomputed": 1.0, "student": ndcg["student"] / llm, "popular": ndcg["popularity"] / llm}


def summarise(shots: Sequence[Shot], deadline_ms: float, weights: Mapping[str, float]) -> dict[str, object]:
    """Return a row's numbers.

    `availability` counts answers with items, `deadline_met` answers in time by the caller's clock, and `goodput`
    weights the latter by tier: 1 means that the LLM answered every request in time.
    """
    num = len(shots)
    in_time = [shot for shot in shots if shot.is_in_time(deadline_ms)]
    latencies_ms = [shot.latency_ms for shot in shots]
    tiers = Counter(shot.outcome.tier for shot in shots)
    return {
        "num_requests": num,
        "availability": round(sum(shot.outcome.is_ok for shot in shots) / num, 5),
        "deadline_met": round(len(in_time) / num, 5),
        "p50_ms": round(percentile(latencies_ms, 0.5), 2),
        "p99_ms": round(percentile(latencies_ms, 0.99), 2),
        "max_ms": round(max(latencies_ms), 2),
        "goodput": round(sum(weights.get(shot.outcome.tier, 0.0) for shot in in_time) / num, 4),
        "tiers": {tier: round(count / num, 4) for tier, count in sorted(tiers.items())},
        "reasons": dict(Counter(shot.outcome.reason for shot in shots).most_common()),
    }


def degraded_share(shots: Sequence[Shot]) -> float:
    """Return the fraction of requests that failed or were degraded; 0 without requests."""
    return sum(not shot.outcome.is_ok or shot.outcome.reason in DEGRADED for shot in shots) / max(1, len(shots))


def answers_recovered_s(shots: Sequence[Shot], back_at_s: float, usual_share: float) -> float | None:
    """Return the seconds from the dependency's return until answers are as before the fault; None if they never are.

    Recovered means: for two seconds, every half-second has a degraded fraction at most 0.1 above the usual.
    """
    bins: dict[int, list[Shot]] = {}
    for shot in shots:
        if shot.at_s >= back_at_s:
            bins.setdefault(int((shot.at_s - back_at_s) / _BIN_S), []).append(shot)
    calm = [number for number, some in bins.items() if degraded_share(some) <= usual_share + _TOLERANCE]
    starts = (number for number in sorted(calm) if set(range(number, number + _CALM_BINS)) <= set(calm))
    first = next(starts, None)
    return None if first is None else first * _BIN_S
