"""Where one request's time went, stage by stage. Stages may overlap (the student works while the LLM does)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stages:
    """A stopwatch per named stage of one request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Measure the block as this stage."""
        started_s = self._clock()
        try:
            yield
        finally:
            self._seconds[stage] = self._clock() - started_s

    def as_ms(self) -> dict[str, float]:
        """Give the milliseconds of each stage measured so far, to the microsecond."""
        return {stage: round(seconds * 1_000, 3) for stage, seconds in self._seconds.items()}
