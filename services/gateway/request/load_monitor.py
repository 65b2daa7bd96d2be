"""Measures the load of this gateway: requests in flight, delay of the event loop, CPU time. Judges each request by it.

A timer samples the loop fifty times a second: everything that is ready to run is delayed as long as the timer, and requests that
wait for their turn or between the edge and here longer. A sample costs about ten microseconds, independent of traffic. What follows from load is decided in `services.router.admission`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge

from services.contracts.access import Priority
from services.errors import Overloaded
from services.gateway.request.turns import Turns
from services.router.admission import Admission, Verdict

RETRY_AFTER_S = 1.0
_SAMPLE_EVERY_S = 0.02
_EDGE_WAIT_LIFE_S = 0.3
_MOST_WAIT_S = 0.1
"""By waiting alone normal priority is answered from memory and nobody is refused: that is the edge's part, which is calm at once."""


class LoadMonitor:
    """Counts the requests that are served in full, and samples the event loop between `start` and `stop`."""

    def __init__(
        self, admission: Admission, strain: Gauge, refused: Counter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.admission = admission
        self.turns = Turns(clock)
        self._strain = strain
        self._refused = refused
        self._clock = clock
        self._num_in_flight = 0
        self._next_sample: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._edge_waits: dict[str, tuple[float, float]] = {}

    def start(self) -> None:
        """Sample the running event loop from now on."""
        self._strain.set(0)
        self._schedule(self._clock())

    def stop(self) -> None:
        """Stop sampling."""
        if self._next_sample is not None:
            self._next_sample.cancel()

    def waited_at_edge(self, door: str, wait_s: float, now_s: float) -> None:
        """Record how long this door's requests wait at present between the edge and here: a delay, too, as long as requests come."""
        self._edge_waits[door] = wait_s, now_s + _EDGE_WAIT_LIFE_S

    def judge(self, priority: Priority) -> Verdict:
        """Decide on a request that arrives now."""
        return self.admission.judge(priority, self._num_in_flight)

    def refusal(self, cause: str) -> Overloaded:
        """Count a request that is refused for this cause, and return its error."""
        self._refused.labels(cause).inc()
        return Overloaded("the gateway", RETRY_AFTER_S)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request while it is served in full."""
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    def _schedule(self, now_s: float) -> None:
        self._due_s = now_s + _SAMPLE_EVERY_S
        self._next_sample = asyncio.get_running_loop().call_later(_SAMPLE_EVERY_S, self._sample)

    def _sample(self) -> None:
        now_s, before = self._clock(), self.admission.strain
        edge_waits_s = [wait_s for wait_s, until_s in self._edge_waits.values() if now_s < until_s]
        wait_s = min(max(self.turns.delay_s, *edge_waits_s, 0.0), _MOST_WAIT_S)
        delay_s = max(now_s - self._due_s, wait_s)
        self.admission.looked(now_s, delay_s, time.process_time())
        if self.admission.strain != before:
            self._strain.set(self.admission.strain)
        self._schedule(now_s)
