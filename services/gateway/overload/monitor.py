"""Measures the gateway's load (requests in flight, event-loop delay, CPU time), and admits requests by it.

A timer samples the loop ten times in a request's usual deadline: everything that is ready to run is delayed as long as
the timer, and requests queued here or at the edge longer. A sample costs about ten microseconds, independent of
traffic, but its wake-up costs more. So the timer samples twice in the deadline while requests come one by one, until
two come within the time of a sample, and twice a second at rest, which the next request ends.
`admission.py` turns load into decisions; `edge_limit.py` computes how many requests the edge may let in at once.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge

from services.contracts.access import Priority
from services.contracts.tenant import DEFAULT_TENANT
from services.errors import Overloaded
from services.gateway.overload.admission import Admission, AdmissionDecision, strain_that_sheds
from services.gateway.overload.begin_queue import BeginQueue
from services.gateway.overload.core_share import CoreShare
from services.gateway.overload.core_times import CoreTimes
from services.gateway.overload.edge_clock import EdgeClock
from services.gateway.overload.edge_limit import EdgeLimit, EdgeMark
from services.gateway.overload.fair_limit import FairLimit
from services.router.deadline import Arrival

DOORS = ("rest", "grpc")
"""Each door has its own edge limit: gRPC reads calls more slowly, and REST's short waits would hide its queue."""
RETRY_AFTER_S = 1.0
_SAMPLE_SHARE, _CALM_SAMPLE_SHARE, _EDGE_WAIT_LIFE_SHARE = 0.1, 0.5, 1.5
"""Of the usual deadline."""
_REST_EVERY_S, _REST_AFTER_S = 0.5, 2.0
_MOST_WAIT_SHARE = 0.5
"""Cap on the wait, of the usual deadline: on its own it sheds normal priority but refuses nobody. The edge refuses, and
stops as soon as the wait is over."""
_NUM_DELAYS, _DELAY_QUANTILE = 256, 0.98
_NUM_OF_COST, _NEWEST_COST_WEIGHT, _COST_WITHIN_S = 16, 0.25, 1.0
"""Slower requests do not count: the process's work at rest, which is subtracted, would be most of their cost."""
_MOST_REST_SHARE = 0.75
"""Of the CPU time of a window with requests."""
_MAX_EDGES = 64


class LoadMonitor:
    """Counts the requests that are served in full, and samples the event loop between `start` and `stop`."""

    def __init__(
        self, admission: Admission, strain: Gauge, refused: Counter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.admission = admission
        deadline_s = admission.limits.deadline_s
        self.queue = BeginQueue(clock, deadline_s)
        self._sample_every_s = min(_REST_EVERY_S, _SAMPLE_SHARE * deadline_s)
        self._calm_every_s = min(_REST_EVERY_S, _CALM_SAMPLE_SHARE * deadline_s)
        self._edge_wait_life_s = _EDGE_WAIT_LIFE_SHARE * deadline_s
        self._strain = strain
        self._refused = refused
        self._clock = clock
        self._num_in_flight = 0
        self._in_flight_of: dict[str, int] = defaultdict(int)
        self._next_sample: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._judged_s = clock()
        self._is_at_rest = self._is_calm = False
        self._delays_s: deque[float] = deque(maxlen=_NUM_DELAYS)
        self.tail_delay_s = 0.0
        """How late the loop is at its latest, usually: this much of a deadline must be kept for sending the answer."""
        self._edge_waits: dict[str, tuple[float, float]] = {}
        self._edge_refusals: dict[Priority, float] = {}
        self._num_judged = self._num_cut = 0
        self._judged_cpu_s, self._cost_began_s = time.process_time(), clock()
        self._rest_busy: float | None = None
        """The least fraction of a core that the process used in a window without requests; None before the first."""
        self._request_cpu_s: float | None = None
        """The process's CPU seconds per request, recently; None while none came for a second."""
        self._full_cpu_s: float | None = None
        """The same while no request is shed."""
        self._alone_cpu_s: float | None = None
        """The CPU seconds of a request that no other overlapped; counts until a flood has shown more."""
        self._num_handling = self._num_handled = 0
        self._core_share, self._core_times = CoreShare(), CoreTimes()

    async def start(self) -> None:
        """Start sampling the running event loop."""
        self._strain.set(0)
        self._schedule(self._clock())

    async def stop(self) -> None:
        """End the sampling."""
        if self._next_sample is not None:
            self._next_sample.cancel()
        self._core_times.close()

    def waited_at_edge(self, door: str, wait_s: float, now_s: float) -> None:
        """Record how long this door's requests currently wait between the edge and this process.

        The wait counts as delay while requests arrive.
        """
        self._edge_waits[door] = wait_s, now_s + self._edge_wait_life_s

    def refused_at_edge(self, priority: Priority, now_s: float) -> None:
        """Record that the edge refuses requests of this priority."""
        self._edge_refusals[priority] = now_s + self._edge_wait_life_s

    def judge(
        self, priority: Priority, tenant: str = DEFAULT_TENANT, weight: float = 1.0, *, is_in_time: bool = True
    ) -> AdmissionDecision:
        """Decide on an arriving request of a tenant of this weight, which ends a rest; a late one is not admitted."""
        self._num_judged += 1
        before_s, self._judged_s = self._judged_s, self._clock()
        is_close = self._judged_s - before_s < self._sample_every_s
        if (self._is_at_rest or (self._is_calm and is_close)) and self._next_sample is not None:
            self._next_sample.cancel()
            self._schedule(self._judged_s)
        self.admission.arrived(priority, tenant, weight)
        num_own = self._in_flight_of[tenant]
        verdict = self.admission.judge(priority, self._num_in_flight, tenant, weight, num_own, self._work_s)
        if verdict is AdmissionDecision.ADMIT and not is_in_time:
            verdict = AdmissionDecision.SHED
        self._num_cut += verdict is not AdmissionDecision.ADMIT
        return verdict

    @property
    def _work_s(self) -> float:
        """Estimated time to serve the waiting requests and, while some wait, the requests in flight."""
        begun_cpu_s = 0.0 if self.queue.is_empty else self._num_in_flight * (self._served_cpu_s or 0.0)
        return self.queue.delay_s + begun_cpu_s / self._core_share.share

    def refusal(self, cause: str) -> Overloaded:
        """Count a request refused for this cause, and return its error."""
        self._refused.labels(cause).inc()
        return Overloaded("the gateway", RETRY_AFTER_S)

    @property
    def has_spare_capacity(self) -> bool:
        """Whether the strain is zero, the queue is empty, and a low-priority request would be admitted."""
        return (
            self.admission.strain == 0
            and self.queue.is_empty
            and self.admission.judge(Priority.LOW, self._num_in_flight) is AdmissionDecision.ADMIT
        )

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Measure a request from reading to its answer, if no other overlaps it, until a flood has shown the cost."""
        if self._full_cpu_s is not None:
            yield
            return
        self._num_handling += 1
        self._num_handled += 1
        number, is_alone, before_s = self._num_handled, self._num_handling == 1, time.process_time()
        try:
            yield
        finally:
            self._num_handling -= 1
        if is_alone and number == self._num_handled:
            self._alone_cpu_s = _blended(self._alone_cpu_s, time.process_time() - before_s)

    @contextmanager
    def working(self, tenant: str = DEFAULT_TENANT) -> Iterator[None]:
        """Count a tenant's request while it is served in full."""
        self._num_in_flight += 1
        self._in_flight_of[tenant] += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            self._in_flight_of[tenant] -= 1
            if not self._in_flight_of[tenant]:
                del self._in_flight_of[tenant]

    def _schedule(self, now_s: float) -> None:
        quiet_s = 0.0 if self._num_in_flight or self.admission.strain else now_s - self._judged_s
        self._is_at_rest = quiet_s >= _REST_AFTER_S
        self._is_calm = self._sample_every_s <= quiet_s < _REST_AFTER_S
        calm_every_s = self._calm_every_s if self._is_calm else self._sample_every_s
        every_s = _REST_EVERY_S if self._is_at_rest else calm_every_s
        self._due_s = now_s + every_s
        self._next_sample = asyncio.get_running_loop().call_later(every_s, self._sample)

    def _sample(self) -> None:
        now_s, before = self._clock(), self.admission.strain
        edge_waits_s = [wait_s for wait_s, until_s in self._edge_waits.values() if now_s < until_s]
        wait_s = min(max(self.queue.delay_s, *edge_waits_s, 0.0), _MOST_WAIT_SHARE * self.admission.limits.deadline_s)
        refused = (priority for priority, until_s in self._edge_refusals.items() if now_s < until_s)
        late_s = max(0.0, now_s - self._due_s)
        self._delays_s.append(late_s)
        self.tail_delay_s = sorted(self._delays_s)[int(_DELAY_QUANTILE * len(self._delays_s))]
        delay_s = max(late_s, wait_s)
        busy_s = time.process_time()
        self.admission.looked(now_s, delay_s, busy_s, max(map(strain_that_sheds, refused), default=0.0))
        self._core_share.looked(now_s, *self._core_times.read(now_s), is_busy=not self.queue.is_empty)
        self._learn_cost(now_s, busy_s)
        if self.admission.strain != before:
            self._strain.set(self.admission.strain)
        self._schedule(now_s)

    def _learn_cost(self, now_s: float, busy_s: float) -> None:
        lasted_s, used_s = now_s - self._cost_began_s, busy_s - self._judged_cpu_s
        is_old = lasted_s > _COST_WITHIN_S
        if is_old and not self._num_judged:
            self._rest_busy = min(used_s / lasted_s, 1.0 if self._rest_busy is None else self._rest_busy)
            self._request_cpu_s = None
        if self._num_judged >= _NUM_OF_COST and not is_old:
            rest_s = min((self._rest_busy or 0.0) * lasted_s, _MOST_REST_SHARE * used_s)
            cost_s = (used_s - rest_s) / self._num_judged
            self._request_cpu_s = _blended(self._request_cpu_s, cost_s)
            if not self._num_cut:
                self._full_cpu_s = _blended(self._full_cpu_s, cost_s)
        if self._num_judged >= _NUM_OF_COST or is_old:
            self._num_judged = self._num_cut = 0
            self._judged_cpu_s, self._cost_began_s = busy_s, now_s

    @property
    def next_takes_s(self) -> float | None:
        """How long a request that arrives now keeps this process, with its part of a core."""
        return None if self.next_cpu_s is None else self.next_cpu_s / self._core_share.share

    @property
    def next_cpu_s(self) -> float | None:
        """The CPU seconds of a request that arrives now: after a pause, and without strain, it is served in full."""
        recent_s = self._request_cpu_s if self.admission.strain else None
        return self._served_cpu_s if recent_s is None else recent_s

    @property
    def _served_cpu_s(self) -> float | None:
        """The CPU seconds of a request that is served in full."""
        return self._alone_cpu_s if self._full_cpu_s is None else self._full_cpu_s


def _blended(known_s: float | None, cost_s: float) -> float:
    return cost_s if known_s is None else known_s + _NEWEST_COST_WEIGHT * (cost_s - known_s)


class EdgeWatch:
    """Reads the edge's marks: when each request reached the edge, and how many the edge may let in."""

    def __init__(self, load: LoadMonitor, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._load = load
        self._clock = clock
        self._wall_clock = wall_clock
        self._arrivals: dict[str, EdgeClock] = {}
        limits = load.admission.limits
        self._limits = {door: EdgeLimit(limits.deadline_s) for door in DOORS}
        self._fair_limits = {door: FairLimit(limits.deadline_s, limits.num_gateways) for door in DOORS}
        self._announced = ""

    @property
    def announcement(self) -> str:
        """The maximum recommendations in flight at the edge, by door, then both fair limits, in the edge's format."""
        now_s = self._clock()
        limits = (limit.announced(now_s, self._headroom(limit.headroom_s)) for limit in self._limits.values())
        return " ".join(map(str, (*limits, *(limit.limit for limit in self._fair_limits.values()))))

    def news(self) -> str | None:
        """Return the announcement if it has changed since the last call."""
        if (announcement := self.announcement) == self._announced:
            return None
        self._announced = announcement
        return announcement

    def arrival(self, mark: EdgeMark | None, door: str) -> Arrival:
        """Return the arrival time of the request being read, on this process's clock: at the edge, if it has a mark."""
        now_s = self._clock()
        if mark is None:
            return Arrival(now_s)
        arrivals = self._arrivals_at(mark.edge)
        waited_s = arrivals.waited_s(mark.stamp_ms, mark.num_in_flight, self._wall_clock(), now_s)
        limit = self._limits[door]
        wait_s = waited_s + self._load.queue.delay_s
        limit.observed(wait_s, mark.num_in_flight, now_s, self._headroom(limit.headroom_s))
        self._fair_limits[door].observed(wait_s, mark.num_in_flight, now_s, self._load.next_cpu_s)
        if mark.refused is not None:
            self._load.refused_at_edge(mark.refused, now_s)
        self._load.waited_at_edge(door, limit.standing_wait_s, now_s)
        return Arrival(now_s - waited_s, waited_s)

    def _headroom(self, within_s: float) -> int | None:
        """Return how many requests all gateways can work off within this time; None if it is not known."""
        takes_s = self._load.next_takes_s
        return int(self._load.admission.limits.num_gateways * within_s / takes_s) if takes_s else None

    def _arrivals_at(self, edge: str) -> EdgeClock:
        """Return the clock of this edge, creating it if unknown.

        Edges come and go with their pods: the least recently seen is dropped.
        """
        clock = self._arrivals.pop(edge, None) or EdgeClock(self._load.admission.limits.deadline_s)
        self._arrivals[edge] = clock
        if len(self._arrivals) > _MAX_EDGES:
            del self._arrivals[next(iter(self._arrivals))]
        return clock
