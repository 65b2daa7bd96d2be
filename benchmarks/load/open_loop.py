"""Open-loop load: requests depart at a fixed rate whether or not earlier requests have returned.

Latency counts from the intended departure, so that stalls of the server, or of the generator, are included (no
coordinated omission). Where the system permits it, the generator runs before a stack of its session (`--up`), since its
delays would count as the stack's.
"""

import asyncio
import gc
import math
import os
import resource
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MAX_IN_FLIGHT = 500
GRACE_S = 10.0
_SENDS_PER_TURN = 16
"""A late generator reads answers after this number of requests."""
_AHEAD = 5
"""Steps of niceness."""


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The end of a request: the answering tier and reason, or the error, and the number of attempts.

    The minimal clients also name the items of the answer.
    """

    is_ok: bool
    tier: str
    reason: str
    num_attempts: int = 1
    item_ids: tuple[str, ...] = ()
    bundle_version: str = ""
    request_id: str = ""


Send = Callable[[int], Awaitable[RequestOutcome]]
"""Sends the request of this number, and never raises."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: seconds from its intended departure to its end, its delay at departure, and its intended departure.

    `at_s` counts from the beginning of the run.
    """

    latency_s: float
    departed_late_s: float
    outcome: RequestOutcome
    at_s: float = 0.0
    number: int = 0

    @property
    def latency_ms(self) -> float:
        """Milliseconds from the intended departure to the end."""
        return 1_000 * self.latency_s

    def is_in_time(self, deadline_ms: float) -> bool:
        """Whether it was answered by the deadline; errors never are."""
        return self.outcome.is_ok and self.latency_ms <= deadline_ms


@dataclass(frozen=True, slots=True)
class Load:
    """One run: its shots, the wall time from the first departure to the last end, the generator's share of one core."""

    shots: Sequence[Shot]
    wall_s: float
    cpu_share: float


async def run_load(send: Send, rate_rps: float, num_requests: int) -> Load:
    """Send `num_requests` at `rate_rps`, evenly spaced."""
    return await run_schedule(send, [number / rate_rps for number in range(num_requests)])


async def run_schedule(send: Send, departures_s: Sequence[float]) -> Load:
    """Send a request at each of these seconds from now."""
    gc.collect()
    gc.disable()  # its pauses in the generator would be counted against the server
    try:
        with ahead_of_the_stack():
            return await _run_schedule(send, departures_s)
    finally:
        gc.enable()


@contextmanager
def ahead_of_the_stack() -> Iterator[None]:
    """Give this process more processor time than processes of equal niceness, if the system permits it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, before - _AHEAD)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


async def _run_schedule(send: Send, departures_s: Sequence[float]) -> Load:
    cpu_before_s, run = _cpu_s(), _Run(send, time.perf_counter())
    for number, departure_s in enumerate(departures_s):
        wait_s = run.started_s + departure_s - time.perf_counter()
        if wait_s > 0 or not number % _SENDS_PER_TURN:
            await asyncio.sleep(max(0.0, wait_s))
        run.depart(number, departure_s)
    while run.running:
        await asyncio.wait(run.running, timeout=GRACE_S / 10)
        run.give_up()
    wall_s = time.perf_counter() - run.started_s
    return Load(run.shots, wall_s, (_cpu_s() - cpu_before_s) / wall_s)


class _Run:
    """The requests in progress, and the ended ones."""

    def __init__(self, send: Send, started_s: float) -> None:
        self._send = send
        self.started_s = started_s
        self.running: set[asyncio.Future[RequestOutcome]] = set()
        self._departed: deque[tuple[float, asyncio.Future[RequestOutcome]]] = deque()
        self.shots: list[Shot] = []

    def depart(self, number: int, at_s: float) -> None:
        """Send a request, unless too many are in progress."""
        departed_s = time.perf_counter() - self.started_s
        if len(self.running) >= MAX_IN_FLIGHT:
            self._record(RequestOutcome(is_ok=False, tier="none", reason="not_sent"), number, at_s, departed_s)
            return
        request = asyncio.ensure_future(self._send(number))
        request.add_done_callback(lambda ended: self._end(ended, number, at_s, departed_s))
        self.running.add(request)
        self._departed.append((departed_s, request))
        self.give_up()

    def give_up(self) -> None:
        """Cancel the requests that have taken too long."""
        least_s = time.perf_counter() - self.started_s - GRACE_S
        while self._departed and (self._departed[0][0] < least_s or self._departed[0][1].done()):
            self._departed.popleft()[1].cancel()

    def _end(self, ended: "asyncio.Future[RequestOutcome]", number: int, at_s: float, departed_s: float) -> None:
        self.running.discard(ended)
        no_answer = RequestOutcome(is_ok=False, tier="none", reason="no_answer")
        self._record(no_answer if ended.cancelled() else ended.result(), number, at_s, departed_s)

    def _record(self, outcome: RequestOutcome, number: int, at_s: float, departed_s: float) -> None:
        latency_s = time.perf_counter() - self.started_s - at_s
        self.shots.append(Shot(latency_s, departed_s - at_s, outcome, at_s, number))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this fraction of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentiles(times_ms: Sequence[float], *percents: int) -> dict[str, float]:
    """Return these percentiles of times, such as p99_ms."""
    return {f"p{percent}_ms": round(percentile(times_ms, percent / 100), 3) for percent in percents}


def summary(load: Load, rate_rps: float, deadline_ms: int) -> dict[str, object]:
    """Return the reported numbers of a run."""
    latencies_ms = [shot.latency_ms for shot in load.shots]
    num_met = sum(shot.is_in_time(deadline_ms) for shot in load.shots)
    late_ms = [1_000 * shot.departed_late_s for shot in load.shots]
    return {
        "rate_rps": rate_rps,
        "num_requests": len(load.shots),
        "deadline_ms": deadline_ms,
        **percentiles(latencies_ms, 50, 95, 99, 100),
        "deadline_met": round(num_met / len(load.shots), 5),
        "goodput_rps": round(num_met / load.wall_s, 2),
        "tiers": dict(Counter(shot.outcome.tier for shot in load.shots)),
        "reasons": dict(Counter(shot.outcome.reason for shot in load.shots)),
        "generator_cpu_share": round(load.cpu_share, 3),
        "generator_late_p99_ms": round(percentile(late_ms, 0.99), 3),
    }


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
