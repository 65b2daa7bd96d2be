"""A period on the monotonic clock."""

import time
from collections.abc import Callable


class Timer:
    """Due once per `every_s`, first after one period."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock() + every_s

    def due(self) -> bool:
        """Say whether the period is over; if so the next one begins now."""
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True
