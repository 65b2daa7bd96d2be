"""Measures the load of this gateway: requests in flight, delay of the event loop, CPU time. Judges each request by it.

A timer samples the loop fifty times a second: everything that is ready to run is delayed as long as the timer. A sample costs
about ten microseconds, independent of traffic. What follows from load is decided in `services.router.admission`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from services.contracts.access import Priority
from services.router.admission import Admission, Verdict

_SAMPLE_EVERY_S = 0.02


class LoadMonitor:
    """Counts the requests that are served in full, and samples the event loop between `start` and `stop`."""

    def __init__(self, admission: Admission, strain: Gauge, clock: Callable[[], float] = time.monotonic) -> None:
        self.admission = admission
        self._strain = strain
        self._clock = clock
        self._num_in_flight = 0
        self._next_sample: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        """Sample the running event loop from now on."""
        self._strain.set(0)
        self._schedule(self._clock())

    def stop(self) -> None:
        """Stop sampling."""
        if self._next_sample is not None:
            self._next_sample.cancel()

    def judge(self, priority: Priority) -> Verdict:
        """Decide on a request that arrives now."""
        return self.admission.judge(priority, self._num_in_flight)

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
        self.admission.looked(now_s, max(0.0, now_s - self._due_s), time.process_time())
        if self.admission.strain != before:
            self._strain.set(self.admission.strain)
        self._schedule(now_s)
