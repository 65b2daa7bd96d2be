"""The wait at an edge whose clock differs, is set, or belongs to one of several; the limit's own simulation is in test_edge_limit.py."""

import random

import pytest

from services.router.arrival_clock import ArrivalClock

FAST_S, SLOW_S = 0.01, 1.0
"""Between two requests at a hundred a second, and at one."""


def waits(stamps_s: list[float], walls_s: list[float], nows_s: list[float]) -> list[float]:
    """Return what one clock computes for requests of these stamps, read at these times."""
    clock = ArrivalClock()
    return [
        clock.waited_s(round(stamp_s * 1_000), wall_s, now_s)
        for stamp_s, wall_s, now_s in zip(stamps_s, walls_s, nows_s, strict=True)
    ]


@pytest.mark.parametrize("step_s", [-3_600.0, -1.0, -0.3, 0.3, 3_600.0])
def test_a_clock_that_is_set_delays_no_request_for_long(step_s: float) -> None:
    """The edge's clock is set after ten seconds of a hundred requests a second, each read 1 ms after it came: few count as late, and none once it is learned."""
    nows_s = [n * FAST_S for n in range(2_000)]
    stamps_s = [1e9 + now_s - 0.001 + (step_s if now_s > 10 else 0) for now_s in nows_s]

    found = waits(stamps_s, [1e9 + now_s for now_s in nows_s], nows_s)

    late = [now_s for now_s, waited_s in zip(nows_s, found, strict=True) if waited_s > 0.1]
    assert len(late) <= 16
    assert max(found[-500:]) < 0.01


@pytest.mark.parametrize("every_s", [FAST_S, SLOW_S])
def test_a_machine_whose_clock_is_set_sees_nothing_of_it(every_s: float) -> None:
    """Edge and gateway of one machine share the clock, also where requests are few."""
    nows_s = [n * every_s for n in range(100)]
    walls_s = [1e9 + now_s - (1.0 if n > 50 else 0) for n, now_s in enumerate(nows_s)]

    assert max(waits([wall_s - 0.001 for wall_s in walls_s], walls_s, nows_s)) < 0.01


def test_a_standing_queue_is_no_step() -> None:
    """The wait grows as time passes and stays: it is reported as it is, also where requests are read in no order."""
    rng, nows_s = random.Random(0), [n * FAST_S / 4 for n in range(4_000)]
    real_s = [min(0.4, 0.8 * now_s) * rng.uniform(0.5, 1) for now_s in nows_s]

    found = waits([now_s - real for now_s, real in zip(nows_s, real_s, strict=True)], nows_s, nows_s)

    assert all(abs(waited_s - real) < 0.02 for waited_s, real in zip(found, real_s, strict=True))


def test_a_stall_that_is_read_in_any_order_is_no_step() -> None:
    """After half a second without reading the newest request is read first, then the oldest ones at once. Those behind contradict a step, and a queue that stands from then on is reported."""
    calm_s = [n * FAST_S for n in range(100)]
    stalled_s = [1.0 + n * FAST_S for n in range(50)]
    queued_s = [1.51 + n * FAST_S for n in range(100)]
    nows_s = [*calm_s, *(1.5 + n * 1e-5 for n in range(50)), *queued_s]
    stamps_s = [*calm_s, stalled_s[-1], *stalled_s[:-1], *(now_s - 0.09 for now_s in queued_s)]

    found = waits(stamps_s, nows_s, nows_s)

    assert found[150:] == pytest.approx([0.09] * 100, abs=0.02)
