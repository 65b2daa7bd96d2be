"""Where one request's time went, stage by stage. Stages may overlap (the student works while the LLM does).

In a traced request each stage is a span too, all of them below the one that was open when the request began.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import Span, SpanKind

from services.observability.tracing import here, span


class Stages:
    """A stopwatch per named stage of one request that arrived at `arrived_s` on the same clock."""

    def __init__(self, clock: Callable[[], float], arrived_s: float) -> None:
        self._clock = clock
        self._arrived_s = arrived_s
        self._above = here()
        self._spent: dict[str, tuple[float, float]] = {}

    @contextmanager
    def measure(self, stage: str, kind: SpanKind = SpanKind.INTERNAL) -> Iterator[Span]:
        """Measure the block as this stage; gives its span, which forgets all notes where nothing is traced."""
        started_s = self._clock()
        try:
            with span(stage, kind, under=self._above) as traced:
                yield traced
        finally:
            self._spent[stage] = (started_s, self._clock() - started_s)

    def as_ms(self) -> dict[str, float]:
        """Return the milliseconds of each stage measured so far, to the microsecond."""
        return {stage: round(seconds * 1_000, 3) for stage, (_, seconds) in self._spent.items()}

    def raw(self) -> list[tuple[str, float, float]]:
        """Give (stage, seconds from arrival to its beginning, seconds) for each stage measured so far."""
        return [(stage, started_s - self._arrived_s, seconds) for stage, (started_s, seconds) in self._spent.items()]
