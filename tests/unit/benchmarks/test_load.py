"""Load generation: departures, latency from the scheduled departure, and figures checked against hand calculations."""

import asyncio
import os
import time

import pytest

from benchmarks.load import capacity, open_loop
from benchmarks.load.open_loop import Load, RequestOutcome, Shot, ahead_of_the_stack, run_load, summary
from benchmarks.load.scoring import answers_recovered_s, summarise, tier_weights
from benchmarks.serve.overload import median_row

OK = RequestOutcome(is_ok=True, tier="student", reason="short_history")
REPORT = {"metrics": {"decoder": {"ndcg@10": 0.125}, "student": {"ndcg@10": 0.1}, "popularity": {"ndcg@10": 0.05}}}
REASONS = {
    "llm": "llm_in_time",
    "precomputed": "precomputed_fresh",
    "student": "llm_unavailable",
    "popular": "unknown_user",
}


def shot(tier: str, ms: float = 10.0, at_s: float = 0.0) -> Shot:
    """Build a shot answered by this tier, or a failed shot ("none")."""
    outcome = RequestOutcome(is_ok=tier != "none", tier=tier, reason=REASONS.get(tier, "http_500"))
    return Shot(ms / 1_000, 0.0, outcome, at_s)


async def test_requests_leave_at_their_rate() -> None:
    """Open loop: requests keep arriving while the server pauses."""
    gate, at_once = asyncio.Event(), 0

    async def send(number: int) -> RequestOutcome:
        """Count the waiting requests; release all at the last arrival."""
        nonlocal at_once
        at_once += 1
        if number == 19:
            gate.set()
        await gate.wait()
        return OK

    load = await run_load(send, rate_rps=200, num_requests=20)

    assert at_once == 20
    assert max(shot.latency_s for shot in load.shots) > 0.09  # the first waited for the last, 19 departures later
    assert load.wall_s > 0.09


async def test_a_generator_that_falls_behind_counts_it_as_latency() -> None:
    """Time lost in a blocked event loop counts as latency (no coordinated omission)."""

    async def send(number: int) -> RequestOutcome:
        """Block the event loop once."""
        if number == 0:
            time.sleep(0.1)  # noqa: ASYNC251 - the very thing under test
        return OK

    load = await run_load(send, rate_rps=100, num_requests=5)

    assert sorted(shot.latency_s for shot in load.shots)[-2] > 0.05


def test_a_run_by_hand() -> None:
    """Failures are never in time, and a tier's weight is its NDCG relative to the LLM's."""
    weights = tier_weights(REPORT)
    shots = [shot("llm")] * 4 + [shot("precomputed")] * 2 + [shot("student", ms=200), shot("popular")]
    shots += [shot("none", ms=1), shot("llm", ms=201)]

    row, whole = summarise(shots, 200, weights), summary(Load(shots, 2.0, 0.5), rate_rps=5, deadline_ms=200)

    assert weights == pytest.approx({"llm": 1.0, "precomputed": 1.0, "student": 0.8, "popular": 0.4})
    assert (row["availability"], row["deadline_met"]) == (0.9, 0.8)
    assert row["goodput"] == pytest.approx((4 + 2 + 0.8 + 0.4) / 10)
    assert (row["p50_ms"], row["p99_ms"], row["max_ms"]) == (10, 201, 201)
    assert row["tiers"] == {"llm": 0.5, "none": 0.1, "popular": 0.1, "precomputed": 0.2, "student": 0.1}
    assert (whole["deadline_met"], whole["goodput_rps"]) == (0.8, 4.0)


def test_recovery_is_the_beginning_of_two_calm_seconds() -> None:
    """Recovery starts with the first two seconds without degradation."""
    good = {10.0 + number / 10 for number in range(100)}
    bad = {at_s for at_s in good if at_s < 11.5 or 12.0 <= at_s < 13.0}
    shots = [shot("student" if at_s in bad else "llm", at_s=at_s) for at_s in sorted(good)]

    assert answers_recovered_s(shots, back_at_s=10.0, usual_share=0.0) == 3.0
    assert answers_recovered_s(shots[::-1], back_at_s=10.0, usual_share=0.0) == 3.0


@pytest.mark.parametrize(("usual_share", "recovered_s"), [(0.0, None), (0.5, 0.0)])
def test_recovery_is_relative_to_the_usual_share(usual_share: float, recovered_s: float | None) -> None:
    """Degradation above the usual fraction until the end gives no recovery time, and neither does an empty run."""
    shots = [shot("student" if number % 2 else "llm", at_s=number / 10) for number in range(100)]

    assert answers_recovered_s(shots, 2.0, usual_share) == recovered_s
    assert answers_recovered_s([], 2.0, usual_share) is None


def test_the_generator_runs_ahead_of_the_stack_only_while_it_sends() -> None:
    """Its niceness is at most the stack's during the load, and the former afterwards."""
    before = os.getpriority(os.PRIO_PROCESS, 0)

    with ahead_of_the_stack():
        during = os.getpriority(os.PRIO_PROCESS, 0)

    assert during <= before
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize(("sustains_rps", "rate_rps"), [(500, 500), (410, 405), (50, None)])
async def test_the_sustained_rate_is_the_highest_that_is_ranked_in_full(
    monkeypatch: pytest.MonkeyPatch, sustains_rps: float, rate_rps: float | None
) -> None:
    """From the rate of waiting callers down by tenths; below a fifth of it the machine is too busy."""
    monkeypatch.setattr(capacity, "PAUSE_S", 0)

    async def share_at(tried_rps: float) -> float:
        """Answer a part from memory above the sustained rate."""
        return min(1.0, sustains_rps / tried_rps)

    if rate_rps is None:
        with pytest.raises(SystemExit, match="free the machine"):
            await capacity.sustained_rps(500, share_at)
    else:
        assert await capacity.sustained_rps(500, share_at) == rate_rps


async def test_answers_from_memory_and_late_answers_are_not_capacity() -> None:
    """Every second answer is from memory, every fourth late."""
    outcomes = [OK, RequestOutcome(is_ok=True, tier="popular", reason="shed")]
    shots = [Shot(0.3 if number % 4 == 2 else 0.1, 0.0, outcomes[number % 2]) for number in range(40)]

    assert capacity.full_share(Load(shots, 1.0, 0.1), deadline_ms=200) == 0.25


async def test_a_request_that_is_not_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as failed, and its call is cancelled."""
    monkeypatch.setattr(open_loop, "GRACE_S", 0.05)
    never: asyncio.Future[RequestOutcome] = asyncio.get_running_loop().create_future()

    load = await run_load(lambda _: never, rate_rps=100, num_requests=1)

    assert never.cancelled()
    assert [shot.outcome.reason for shot in load.shots] == ["no_answer"]


def test_a_row_has_the_medians_of_its_rounds() -> None:
    """A number that a round lacks does not count; a reason that it lacks counts zero."""
    case = {"door": "rest", "priority": "high", "multiple": 5.0, "is_after_overload": False}
    late: tuple[float | None, ...] = (None, 4.0, 9.0)
    reasons: tuple[dict[str, int], ...] = ({"http_429": 7}, {}, {"http_503": 3})
    rounds = [
        case | {"goodput_rps": goodput, "refused_p99_ms": ms, "reasons": own}
        for goodput, ms, own in zip((500.0, 90.0, 480.0), late, reasons, strict=True)
    ]

    row = median_row(rounds)

    assert row == case | {
        "goodput_rps": 480.0,
        "refused_p99_ms": 6.5,
        "reasons": {"http_429": 0, "http_503": 0},
        "goodput_rps_by_round": [500.0, 90.0, 480.0],
    }
