"""The edge's learned limit against a simulated service of two FIFO processes behind an edge that counts."""

import heapq
import random
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gateway.overload.edge_clock import EdgeClock
from services.gateway.overload.edge_limit import EdgeLimit

DEADLINE_S = 0.2
CAPACITY_RPS = 600.0
NUM_PROCESSES = 2


@dataclass
class Outcome:
    """The callers' results in the second half of a run."""

    goodput_rps: float
    worst_s: float
    num_refused: int


def run(rate_rps: float, seconds: float, slow_from_s: float = 1e9, skew_ms: int = 0) -> Outcome:
    """Simulate this open-loop rate; from `slow_from_s` on each request costs twice as much."""
    rng, order = random.Random(1), count()
    free_at_s = [0.0] * NUM_PROCESSES
    clocks, limits = ([make() for _ in range(NUM_PROCESSES)] for make in (EdgeClock, EdgeLimit))
    in_flight: list[float] = []
    reads: list[tuple[float, int, int, int, int]] = []
    limit, now_s, good, worst_s, num_refused = 10**6, 0.0, 0, 0.0, 0
    while now_s < seconds:
        now_s += rng.expovariate(rate_rps)
        while in_flight and in_flight[0] <= now_s:
            heapq.heappop(in_flight)
        while reads and reads[0][0] <= now_s:
            read_s, _, process, stamp_ms, num = heapq.heappop(reads)
            limits[process].observed(clocks[process].waited_s(stamp_ms, num, read_s, read_s), num, read_s)
            limit = limits[process].limit
        if len(in_flight) >= limit:
            num_refused += now_s > seconds / 2
            continue
        process = rng.randrange(NUM_PROCESSES)
        begins_s = max(now_s, free_at_s[process])
        cost_s = NUM_PROCESSES / CAPACITY_RPS * rng.uniform(0.5, 1.5) * (2 if now_s > slow_from_s else 1)
        free_at_s[process] = ends_s = begins_s + cost_s
        heapq.heappush(in_flight, ends_s)
        heapq.heappush(reads, (begins_s, next(order), process, int(now_s * 1_000) + skew_ms, len(in_flight)))
        if now_s > seconds / 2:
            good += ends_s - now_s <= DEADLINE_S
            worst_s = max(worst_s, ends_s - now_s)
    return Outcome(good / (seconds / 2), worst_s, num_refused)


@pytest.mark.parametrize("skew_ms", [0, 3_600_000])
def test_goodput_stays_at_its_peak_from_half_to_five_times_the_capacity(skew_ms: int) -> None:
    """Below capacity no request is refused; above, goodput is at least 90 % of its peak and no answer is 20 ms late."""
    outcomes = {multiple: run(multiple * CAPACITY_RPS, 12.0, skew_ms=skew_ms) for multiple in (0.5, 1.0, 2.0, 3.0, 5.0)}

    peak_rps = max(outcome.goodput_rps for outcome in outcomes.values())
    assert outcomes[0.5].num_refused == 0
    assert all(outcome.goodput_rps >= 0.9 * peak_rps for multiple, outcome in outcomes.items() if multiple >= 1)
    assert all(outcome.worst_s <= DEADLINE_S + 0.02 for outcome in outcomes.values())


def test_a_service_that_becomes_slower_is_learned() -> None:
    """Half the capacity is learned within seconds, and no answer is late afterwards."""
    outcome = run(2 * CAPACITY_RPS, 12.0, slow_from_s=3.0)

    assert outcome.goodput_rps >= 0.9 * CAPACITY_RPS / 2
    assert outcome.worst_s <= DEADLINE_S + 0.02


def test_without_a_limit_overload_makes_every_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit the simulation shows the fault that the limit prevents."""
    monkeypatch.setattr(EdgeLimit, "observed", lambda *_: None)

    assert run(2 * CAPACITY_RPS, 12.0).goodput_rps == 0


def calm(limit: EdgeLimit, num_in_flight: int, headroom: int, from_s: float, num_windows: int = 1) -> int:
    """Report windows without waits, and return the limit."""
    for window in range(num_windows):
        for _ in range(6):
            limit.observed(0.0, num_in_flight, from_s + 0.11 * window, headroom)
    return limit.limit


def test_a_burst_is_admitted_as_far_as_it_can_be_worked_off() -> None:
    """Calm windows permit the requests in flight and the headroom, however long they last."""
    limit = EdgeLimit()

    assert calm(limit, 10, 60, 1.0, 300) == 70
    assert calm(limit, 40, 60, 60.0, 300) == 100


def test_a_quarter_of_the_headroom_is_always_admitted() -> None:
    """Waits of so few requests are not their own doing."""
    limit = EdgeLimit()
    for number in range(100):
        limit.observed(0.5, 100, float(number), 80)

    assert limit.limit == 20


def test_a_wait_of_exactly_the_target_leaves_the_limit() -> None:
    """Only a longer wait lowers it."""
    limit = EdgeLimit()
    learned = calm(limit, 100, 60, 1.0, 20)
    for _ in range(6):
        limit.observed(limit.target_s, 100, 10.0, 60)

    assert limit.limit == learned


def test_what_another_gateways_limit_admits_without_a_wait_is_permitted() -> None:
    """A low limit follows the requests in flight at once, instead of rising by a twentieth at a time."""
    limit = EdgeLimit()
    for number in range(100):
        limit.observed(0.5, 100, float(number), 80)

    assert calm(limit, 60, 80, 200.0) >= 60


def test_a_burst_after_a_pause_may_fill_the_headroom_only() -> None:
    """The announced limit follows the last window's requests in flight, and forgets them within a second."""
    limit = EdgeLimit()
    learned = calm(limit, 100, 60, 1.0, 20)
    assert limit.announced(3.2, 60) == learned == 160
    calm(limit, 10, 60, 3.3)

    assert limit.announced(3.4, 60) == 70
    assert limit.announced(5.0, 60) == 60
    assert limit.announced(5.0, 2) == 8
    assert limit.announced(5.0, None) == limit.limit


class LimitUnderAnyLoad(RuleBasedStateMachine):
    """Windows with any waits and counts, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = EdgeLimit()
        self.now_s = 0.0

    def window(self, wait_s: float, num_in_flight: int) -> tuple[int, int]:
        """Simulate a window where every request waits this long; return the limit before and after."""
        self.now_s += wait_s + 0.11
        before = self.limit.limit
        for _ in range(6):
            self.limit.observed(wait_s, num_in_flight, self.now_s)
        return before, self.limit.limit

    @rule(wait_s=st.floats(0.031, 30.0), num_in_flight=st.integers(1, 5_000))
    def standing_queue(self, wait_s: float, num_in_flight: int) -> None:
        """A sustained queue lowers the limit below the requests in flight, to at least half of them."""
        before, after = self.window(wait_s, num_in_flight)
        reached = min(before, num_in_flight)
        assert max(8, int(reached * 0.5)) <= after <= max(8, int(reached * 0.8))

    @rule(wait_s=st.floats(0.0, 0.014), num_in_flight=st.integers(1, 5_000))
    def calm(self, wait_s: float, num_in_flight: int) -> None:
        """A calm window raises the limit."""
        before, after = self.window(wait_s, num_in_flight)
        assert after > before or after == 4_096

    @rule(seconds=st.floats(0.0, 100.0))
    def pause(self, seconds: float) -> None:
        """Let time pass without requests."""
        self.now_s += seconds

    @invariant()
    def is_within_bounds(self) -> None:
        """The limit is within its bounds, also at the start."""
        assert 8 <= self.limit.limit <= 4_096

    def teardown(self) -> None:
        """After five calm seconds the limit is at least ten times higher."""
        before = self.limit.limit
        for _ in range(50):
            self.window(0.0, 1)
        assert self.limit.limit >= min(4_096, 10 * before)


LimitUnderAnyLoad.TestCase.settings = hypothesis_settings(max_examples=50, stateful_step_count=20, deadline=None)
TestLimitUnderAnyLoad = LimitUnderAnyLoad.TestCase
