"""The load generator counts latency from the intended departure, and no error meets a deadline."""

import asyncio
import time

import pytest

from benchmarks.load.open_loop import Load, RequestOutcome, Shot, percentile, run_load, summary

OK = RequestOutcome(is_ok=True, tier="student", reason="short_history")


async def test_requests_leave_at_their_rate() -> None:
    """Open loop: a server that pauses receives all requests meanwhile."""
    gate, at_once = asyncio.Event(), 0

    async def send(number: int) -> RequestOutcome:
        """Count the waiting requests; release all when the last has arrived."""
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
    """The wait for a blocked event loop is latency (no coordinated omission)."""

    async def send(number: int) -> RequestOutcome:
        """Block the loop once."""
        if number == 0:
            time.sleep(0.1)  # noqa: ASYNC251 - the very thing under test
        return OK

    load = await run_load(send, rate_rps=100, num_requests=5)

    assert sorted(shot.latency_s for shot in load.shots)[-2] > 0.05


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.95, 10), (0.99, 10), (0.1, 1), (0.0, 1)])
def test_percentiles_are_by_nearest_rank(share: float, value: int) -> None:
    """The percentiles of one to ten are members of them."""
    assert percentile(list(range(10, 0, -1)), share) == value


def test_an_error_never_meets_its_deadline() -> None:
    """A fast error is not in time."""
    error = RequestOutcome(is_ok=False, tier="none", reason="http_503")
    shots = [Shot(0.01, 0, OK), Shot(0.06, 0, OK), Shot(0.001, 0, error), Shot(0.02, 0, OK)]

    row = summary(Load(shots, wall_s=2.0, cpu_share=0.5), rate_rps=2, deadline_ms=50)

    assert (row["deadline_met"], row["goodput_rps"], row["num_errors"]) == (0.5, 1.0, 1)
    assert row["tiers"] == {"student": 3, "none": 1}
