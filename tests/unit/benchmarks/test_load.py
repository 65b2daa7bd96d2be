"""The load generator hides nothing: waiting counts from the intended departure, errors never meet a deadline."""

import asyncio
import time

import pytest

from benchmarks.load.audience import Audience
from benchmarks.load.open_loop import Load, RequestOutcome, Shot, percentile, run_load, summary

OK = RequestOutcome(is_ok=True, tier="student", reason="short_history")


async def test_requests_leave_at_their_rate_whatever_comes_back() -> None:
    """Open loop: a server that answers nothing for a while meets all requests at once."""
    gate, at_once = asyncio.Event(), 0

    async def send(number: int) -> RequestOutcome:
        """Count who waits; let all go when the last has come."""
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
    """A blocked event loop is no reason to forget the wait (no coordinated omission)."""

    async def send(number: int) -> RequestOutcome:
        """Block the loop once."""
        if number == 0:
            time.sleep(0.1)  # noqa: ASYNC251 - the very thing under test
        return OK

    load = await run_load(send, rate_rps=100, num_requests=5)

    assert sorted(shot.latency_s for shot in load.shots)[-2] > 0.05


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.95, 10), (0.99, 10), (0.1, 1), (0.0, 1)])
def test_percentiles_are_by_nearest_rank(share: float, value: int) -> None:
    """Of one to ten."""
    assert percentile(list(range(10, 0, -1)), share) == value


def test_an_error_never_meets_its_deadline() -> None:
    """However fast."""
    error = RequestOutcome(is_ok=False, tier="none", reason="http_503")
    shots = [Shot(0.01, 0, OK), Shot(0.06, 0, OK), Shot(0.001, 0, error), Shot(0.02, 0, OK)]

    told = summary(Load(shots, wall_s=2.0, cpu_share=0.5), rate_rps=2, deadline_ms=50)

    assert (told["deadline_met"], told["goodput_rps"], told["num_errors"]) == (0.5, 1.0, 1)
    assert told["tiers"] == {"student": 3, "none": 1}


def test_a_mixed_audience_takes_the_tiers_in_turn_and_skips_those_without_people() -> None:
    """Each tier's own requests, none left out."""
    audience = Audience(listed_user_ids=(), known_user_ids=("1",), item_ids=("a", "b"))
    asks = audience.asks("mixed")

    assert audience.asks("precomputed") is None
    assert asks is not None
    assert [asks(n).get("user_id") for n in range(6)] == ["1", None, "nobody-0", "1", None, "nobody-1"]
