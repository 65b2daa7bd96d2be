"""The wait at an edge whose clock differs or is set; test_edge_limit.py simulates the limit."""

import random

import pytest

from services.gateway.overload.edge_clock import EdgeClock

FAST_S, CALM_S, SLOW_S = 0.01, 0.1, 1.0
"""Seconds between two requests at 100, 10 and 1 requests per second."""


def waits(
    stamps_s: list[float], walls_s: list[float], nows_s: list[float], in_flight: list[int] | None = None
) -> list[float]:
    """Return one clock's waits for these stamps, read at these times; by default one request is in flight."""
    clock = EdgeClock()
    return [
        clock.waited_s(round(stamp_s * 1_000), num_in_flight, wall_s, now_s)
        for stamp_s, num_in_flight, wall_s, now_s in zip(
            stamps_s, in_flight or [1] * len(stamps_s), walls_s, nows_s, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("every_s", "step_s"),
    [
        (FAST_S, -0.3),
        (FAST_S, 0.3),
        *((every_s, step_s) for every_s in (FAST_S, CALM_S) for step_s in (-3_600.0, -1.0, 3_600.0)),
    ],
)
def test_a_clock_that_is_set_delays_no_request_for_long(every_s: float, step_s: float) -> None:
    """After the edge's clock is set, at most three requests count as late until the new offset is learned."""
    nows_s = [n * every_s for n in range(2_000)]
    stamps_s = [1e9 + now_s - 0.001 + (step_s if n > 1_000 else 0) for n, now_s in enumerate(nows_s)]

    waits_s = waits(stamps_s, [1e9 + now_s for now_s in nows_s], nows_s)

    assert sum(waited_s > 0.1 for waited_s in waits_s) <= 3
    assert max(waits_s[-500:]) < 0.01


@pytest.mark.parametrize("every_s", [FAST_S, SLOW_S])
def test_a_machine_whose_clock_is_set_sees_nothing_of_it(every_s: float) -> None:
    """Edge and gateway on one machine share the clock, so setting it changes no wait, also at low rates."""
    nows_s = [n * every_s for n in range(100)]
    walls_s = [1e9 + now_s - (1.0 if n > 50 else 0) for n, now_s in enumerate(nows_s)]

    assert max(waits([wall_s - 0.001 for wall_s in walls_s], walls_s, nows_s)) < 0.01


def test_a_standing_queue_is_no_step() -> None:
    """A growing, then constant queue is reported as it is, even if requests are read out of order."""
    rng, nows_s = random.Random(0), [n * FAST_S / 4 for n in range(4_000)]
    real_s = [min(0.4, 0.8 * now_s) * rng.uniform(0.5, 1) for now_s in nows_s]

    waits_s = waits([now_s - real for now_s, real in zip(nows_s, real_s, strict=True)], nows_s, nows_s)

    assert all(abs(waited_s - real) < 0.02 for waited_s, real in zip(waits_s, real_s, strict=True))


def test_requests_that_were_overtaken_are_no_step() -> None:
    """After a stall of a second, nine requests read after the newest request have their true waits."""
    calm_s = [n * CALM_S for n in range(100)]
    stalled_s = [10.0 + n * 0.11 for n in range(10)]
    nows_s = [*calm_s, *(11.0 + n * 1e-3 for n in range(10))]
    stamps_s = [*calm_s, stalled_s[-1], *stalled_s[:-1]]

    waits_s = waits(stamps_s, nows_s, nows_s, [1] * 100 + [10, *range(1, 10)])

    assert waits_s[101:] == pytest.approx(
        [now_s - stamp_s for now_s, stamp_s in zip(nows_s, stamps_s, strict=True)][101:], abs=0.002
    )


def test_a_stall_that_is_read_in_any_order_is_no_step() -> None:
    """Reading the newest request first after a stall does not count as a clock step, and a later queue is reported."""
    calm_s = [n * FAST_S for n in range(100)]
    stalled_s = [1.0 + n * FAST_S for n in range(50)]
    queued_s = [1.51 + n * FAST_S for n in range(100)]
    nows_s = [*calm_s, *(1.5 + n * 1e-5 for n in range(50)), *queued_s]
    stamps_s = [*calm_s, stalled_s[-1], *stalled_s[:-1], *(now_s - 0.09 for now_s in queued_s)]

    waits_s = waits(stamps_s, nows_s, nows_s)

    assert waits_s[150:] == pytest.approx([0.09] * 100, abs=0.02)


@pytest.mark.parametrize(("deadline_s", "least_wait_s"), [(0.2, 0.0), (2.0, 0.4)])
def test_a_step_is_larger_than_half_of_the_usual_deadline(deadline_s: float, least_wait_s: float) -> None:
    """A clock change of 0.4 s counts as a step with deadlines of 0.2 s, and only as a wait with deadlines of 2 s."""
    clock = EdgeClock(deadline_s)
    nows_s = [n * FAST_S for n in range(400)]

    waits_s = [
        clock.waited_s(round(1_000 * (now_s - 0.4 * (n > 200))), 1, now_s, now_s) for n, now_s in enumerate(nows_s)
    ]

    assert min(waits_s[-50:]) == pytest.approx(least_wait_s, abs=0.01)
