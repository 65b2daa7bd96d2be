"""Traces of single requests, by OpenTelemetry: where they begin, how a span is made inside one, how their context travels.

    Tracing.entry    at a door, in a replica, in the worker: goes on with the caller's trace or begins one, if it is sampled
      span           anywhere inside: a child of what is current, or nothing at all
      trace_headers  the W3C context of what is current, for a message to another process

Off (no provider), and for requests that are not sampled, a span is one look at a context variable. Finished spans wait in
a bounded queue for a thread of their own: a collector that is slow or away costs spans, never time. Log lines inside an
entry carry its trace id. Names and attributes: docs/traces.md. How spans leave the process: services.observability.trace_export. Knows
no request, engine or broker.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
)
from opentelemetry.trace import set_span_in_context as as_parent
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | int | float | bool]
TraceHeaders = tuple[tuple[str, str], ...]
"""`traceparent` and, when the caller sent one, `tracestate`."""

_STOP_S = 1.0

_NOTHING: AbstractContextManager[Span] = nullcontext(INVALID_SPAN)
_W3C = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Place:
    """A span that is open, under which others may hang."""

    tracer: Tracer
    span: Span


_current: ContextVar[Place | None] = ContextVar("place_in_trace", default=None)


class Tracing:
    """Where the traces of one process begin and leave it. Without a provider it does nothing."""

    def __init__(self, provider: "TracerProvider | None" = None, end: Callable[[], None] = lambda: None) -> None:
        """Take what samples and exports; `end` is what makes an export that is under way give up."""
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("tailrace")
        self._end = end

    @property
    def is_off(self) -> bool:
        """Whether nothing is ever traced in this process."""
        return self._tracer is None

    def entry(
        self,
        name: str,
        headers: Mapping[str, str],
        kind: SpanKind = SpanKind.SERVER,
        attributes: Attributes | None = None,
    ) -> AbstractContextManager[Span]:
        """Open this process's part of a trace: that of the headers (lower-case names), or a new one. Not sampled: nothing."""
        if self._tracer is None:
            return _NOTHING
        opened = self._tracer.start_span(name, _W3C.extract(headers), kind, attributes)
        return _entered(Place(self._tracer, opened)) if opened.is_recording() else _NOTHING

    def continuation(
        self, name: str, sender: TraceHeaders, attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        """Open this process's part of the sender's trace; without a sender's context nothing begins."""
        return self.entry(name, dict(sender), SpanKind.SERVER, attributes) if sender else _NOTHING

    def joint_entry(
        self, name: str, senders: Sequence[TraceHeaders], attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        """Open the work on several messages: part of the first sampled sender's trace, with links to all. None: nothing."""
        if self._tracer is None:
            return _NOTHING
        contexts = [get_current_span(_W3C.extract(dict(sender))).get_span_context() for sender in senders if sender]
        links = [Link(context) for context in contexts if context.trace_flags.sampled]
        if not links:
            return _NOTHING
        first = as_parent(NonRecordingSpan(links[0].context))
        opened = self._tracer.start_span(name, first, SpanKind.CONSUMER, attributes, links=links)
        return _entered(Place(self._tracer, opened))

    def stop(self) -> None:
        """Send what waits, for at most a second, and end. A collector that does not answer is left alone."""
        if self._provider is None:
            return
        ending = threading.Thread(target=self._provider.shutdown, name="end-tracing", daemon=True)
        ending.start()
        ending.join(_STOP_S)
        if ending.is_alive():
            self._end()


def span(
    name: str,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
    *,
    under: Place | None = None,
) -> AbstractContextManager[Span]:
    """Open a span below `under`, or below what is current; where nothing is traced, give one that takes notes and forgets."""
    above = under or _current.get()
    if above is None:
        return _NOTHING
    return _opened(Place(above.tracer, above.tracer.start_span(name, as_parent(above.span), kind, attributes)))


def here() -> Place | None:
    """Return the open span, for others to be put under it later; None where nothing is traced."""
    return _current.get()


def note(attributes: Attributes) -> None:
    """Add attributes to the open span, if there is one."""
    if (place := _current.get()) is not None:
        place.span.set_attributes(attributes)


def note_failure(kind: str, *, is_ours: bool) -> None:
    """Say on the open span, if there is one, how the work failed; only what is our fault makes the span an error."""
    if (place := _current.get()) is not None:
        place.span.set_attribute("error.type", kind)
        if is_ours:
            place.span.set_status(Status(StatusCode.ERROR, kind))


def trace_headers() -> TraceHeaders:
    """Return the W3C context of the open span, for a message; empty where nothing is traced."""
    place = _current.get()
    if place is None:
        return ()
    headers: dict[str, str] = {}
    _W3C.inject(headers, as_parent(place.span))
    return tuple(headers.items())


def trace_id() -> str | None:
    """Return the id of the trace (32 hex digits) that the open span is part of; None where nothing is traced."""
    place = _current.get()
    return None if place is None else format_trace_id(place.span.get_span_context().trace_id)


def past_span(name: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
    """Tell of work below the open span that is over; times are monotonic seconds of this process. Nothing where not traced."""
    if (place := _current.get()) is not None:
        to_unix_s = time.time() - time.monotonic()
        start_ns, end_ns = (int((moment_s + to_unix_s) * 1e9) for moment_s in (start_s, end_s))
        past = place.tracer.start_span(name, as_parent(place.span), attributes=attributes, start_time=start_ns)
        past.end(max(start_ns, end_ns))


@contextmanager
def _entered(place: Place) -> Iterator[Span]:
    known_as = format_trace_id(place.span.get_span_context().trace_id)
    with structlog.contextvars.bound_contextvars(trace_id=known_as), _opened(place) as opened:
        yield opened


@contextmanager
def _opened(place: Place) -> Iterator[Span]:
    before = _current.set(place)
    try:
        yield place.span
    except Exception as error:
        note_failure(type(error).__qualname__, is_ours=True)
        raise
    finally:
        _current.reset(before)
        place.span.end()
