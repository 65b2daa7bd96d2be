"""How loaded this gateway is: what it works on, how late its event loop runs, how busy it is. Judges each arrival by that.

The loop is looked at fifty times a second by a timer: as late as the timer fires, so late is everything that is ready. Costs
about ten microseconds a look and nothing that grows with traffic. What follows from load is decided in `services.router.admission`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Gauge

from services.contracts.access import Priority
from services.router.admission import Admission, Verdict

_LOOK_EVERY_S = 0.02


class LoadWatch:
    """Counts the requests that are worked on in full, and samples the event loop between `start` and `stop`."""

    def __init__(self, admission: Admission, strain: Gauge, clock: Callable[[], float] = time.monotonic) -> None:
        self._admission = admission
        self._strain = strain
        self._clock = clock
        self._num_in_flight = 0
        self._next_look: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        """Look at the running event loop from now on."""
        self._strain.set(0)
        self._plan_look(self._clock())

    def stop(self) -> None:
        """Look no more."""
        if self._next_look is not None:
            self._next_look.cancel()

    def judge(self, priority: Priority) -> Verdict:
        """Decide on a request that arrives now."""
        return self._admission.judge(priority, self._num_in_flight)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request that is worked on in full."""
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    def _plan_look(self, now_s: float) -> None:
        self._due_s = now_s + _LOOK_EVERY_S
        self._next_look = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        now_s, before = self._clock(), self._admission.strain
        self._admission.looked(now_s, max(0.0, now_s - self._due_s), time.process_time())
        if self._admission.strain != before:
            self._strain.set(self._admission.strain)
        self._plan_look(now_s)
