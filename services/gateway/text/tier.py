"""The text writer behind its limits: places, breaker, deadline. The same for our own deployment and a remote server.

    place free? ─▶ not strained? ─▶ breaker closed? ─▶ write each event before the deadline ─▶ tell the breaker

Recommendations have precedence over text: a strained gateway, which answers recommendations from memory, refuses text.
Knows no HTTP, and no writer by name.
"""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import structlog

from services.contracts.access import nearest_class, places_for
from services.contracts.fairness import has_place
from services.contracts.text import TextEvent, TextModel, TextRequest, TextWriter
from services.errors import DependencyUnavailable, InvalidRequest, Overloaded, SchemaViolated, TailraceError
from services.gateway.overload.admission import AdmissionDecision
from services.gateway.overload.monitor import LoadMonitor
from services.gateway.text.deadline import in_time
from services.gateway.text.metrics import TextReport
from services.router.breaker import Breaker, BreakerState

log = structlog.get_logger()

NUM_PLACES = 64
GRACE_S = 0.5
"""How long after the deadline our own writer, which ends its texts itself, may report them; none for another server."""
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """Limits of one caller's request, the default deadline, its grace, and the longest silence of a stream.

    Proxies commonly close a connection that is silent for 30 to 75 seconds.
    """

    max_tokens: int = 1_024
    max_choices: int = 16
    deadline_ms: int = 60_000
    silence_s: float = 15.0
    grace_s: float = GRACE_S


class TextTier:
    """The writer behind its limits. One per process.

    Args:
        writer: The text writer.
        breaker: Opens when the writer fails.
        load: Decides when recommendations take precedence over text.
        report: Metrics and log.
        limits: Read by the doors, which enforce them.
        num_places: Choices that may be written at once; the last places are reserved for higher priorities.
        clock: Monotonic seconds.
        wall_clock: Unix seconds, used for deadlines across processes.
    """

    def __init__(
        self,
        *,
        writer: TextWriter,
        breaker: Breaker,
        load: LoadMonitor,
        report: TextReport,
        limits: TextLimits,
        num_places: int = NUM_PLACES,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.limits = limits
        self._writer = writer
        self._breaker = breaker
        self._load = load
        self._report = report
        self._num_places = num_places
        self._clock = clock
        self._wall_clock = wall_clock
        self._num_in_flight = 0
        self._in_flight_of: dict[str, int] = defaultdict(int)

    async def models(self) -> tuple[TextModel, ...]:
        """Return the served models. Raises DependencyUnavailable."""
        return await self._writer.models()

    def check_fits(self, num_choices: int, priority: int) -> None:
        """Reject a call that no retry can fix: more choices than its priority ever has places.

        Raises InvalidRequest.
        """
        most = places_for(priority, self._num_places)
        if num_choices > most:
            raise InvalidRequest("prompt", f"{num_choices} choices of all prompts", f"send at most {most} at once")

    async def write(self, request: TextRequest, route: str) -> AsyncGenerator[TextEvent, None]:
        """Write within the limits; see TextWriter. `route` is the label of the metrics.

        After the deadline, open choices end with DEADLINE; before the first token, raises DeadlineExceeded instead.
        """
        self._check(request)
        number = self._breaker.started(self._clock())
        self._count(request.tenant, request.n)
        meter = self._report.watch(route, in_pieces=request.in_pieces)
        verdict: Callable[[], None] = partial(self._breaker.abandoned, number)
        try:
            async with aclosing(in_time(self._writer, request, self._wall_clock, self.limits.grace_s)) as events:
                async for event in events:
                    meter.saw(event)
                    yield event
            verdict = self._breaker.succeeded
        except TailraceError as error:
            if isinstance(error, DependencyUnavailable):
                verdict = self._failed
            if isinstance(error, SchemaViolated):
                self._report.metrics.schema_violations.inc()
            raise
        except Exception:
            verdict = self._failed
            raise
        finally:
            verdict()
            self._count(request.tenant, -request.n)

    def _check(self, request: TextRequest) -> None:
        priority = nearest_class(request.priority)
        if not self._has_places(request, places_for(priority, self._num_places)):
            raise Overloaded("text", _RETRY_AFTER_S)
        if self._load.judge(priority, request.tenant, request.weight) is not AdmissionDecision.ADMIT:
            raise Overloaded("text", _RETRY_AFTER_S)
        if not self._breaker.allows(self._clock()):
            raise DependencyUnavailable("text", _RETRY_AFTER_S)

    def _has_places(self, request: TextRequest, num_places: int) -> bool:
        """Whether the places open to the request's priority and tenant hold all its choices."""
        num_held, num_own = self._num_in_flight, self._in_flight_of.get(request.tenant, 0)
        share = self._load.admission.share_of(request.tenant, request.weight)
        return has_place(num_held + request.n - 1, num_places, num_own + request.n - 1, share)

    def _count(self, tenant: str, num_choices: int) -> None:
        self._num_in_flight += num_choices
        self._in_flight_of[tenant] += num_choices
        if not self._in_flight_of[tenant]:
            del self._in_flight_of[tenant]
        metrics = self._report.metrics
        metrics.in_flight.inc(num_choices)
        metrics.breaker_open.set(self._breaker.state(self._clock()) is BreakerState.OPEN)

    def _failed(self) -> None:
        self._breaker.failed(self._clock())
