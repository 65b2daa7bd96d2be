"""How often a stream worker does what it does not do for each batch."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """The periods of what is not done for each batch."""

    checkpoint_every_s: float = 1.0
    checkpoint_every_events: int = 10_000
    popularity_every_s: float = 1.0
    popularity_at_least_every_s: float = 10.0
    """Unchanged windows are written again this often, for a store that lost them."""
    popularity_num_items: int = 200
    lag_every_s: float = 1.0
    renew_every_s: float = 1.0
    """Leases are renewed, a store that went back is noticed, and partitions that came free are claimed."""
    compact_every_s: float = 5.0
    """Each time one partition's files are compacted, the next one's after that."""
    retry_after_s: float = 0.5

    @property
    def timers_s(self) -> tuple[float, float, float, float]:
        """The periods of checkpoint, popularity, lag and compaction."""
        return self.checkpoint_every_s, self.popularity_every_s, self.lag_every_s, self.compact_every_s


DEFAULT_PACE = Pace()


class Timer:
    """A period on the monotonic clock: due once per `every_s`, first after one period."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock() + every_s

    def due(self) -> bool:
        """Whether the period is over; if so the next one begins now."""
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True
