"""Request traces by OpenTelemetry: entry spans, child spans, context propagation and export.

    Tracing.entry    at a door, in a replica, in the worker: continue the caller's trace or start a new one, if it is
    sampled
      span           anywhere inside: a child of the current span, or a no-op
      trace_headers  the W3C context of the current span, for a message to another process

When tracing is off, and for requests that are not sampled, a span costs one read of a context variable. Finished spans
wait in a bounded queue for an export thread: a slow or unavailable collector loses spans and never delays a request.
Log lines inside an entry carry its trace id. Names and attributes: docs/traces.md.
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
class ParentSpan:
    """An open span that can be a parent."""

    tracer: Tracer
    span: Span


_current: ContextVar[ParentSpan | None] = ContextVar("place_in_trace", default=None)


class Tracing:
    """The tracer of one process. Without a provider it does nothing."""

    def __init__(self, provider: "TracerProvider | None" = None, end: Callable[[], None] = lambda: None) -> None:
        """Take the provider, which samples and exports (None turns tracing off), and `end`, which aborts an export."""
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("tailrace")
        self._end = end

    @property
    def is_off(self) -> bool:
        return self._tracer is None

    def entry(
        self,
        name: str,
        headers: Mapping[str, str],
        kind: SpanKind = SpanKind.SERVER,
        attributes: Attributes | None = None,
    ) -> AbstractContextManager[Span]:
        """Open this process's entry span: in the trace of the headers (lower-case names), or in a new trace.

        No-op if not sampled.
        """
        if self._tracer is None:
            return _NOTHING
        opened = self._tracer.start_span(name, _W3C.extract(headers), kind, attributes)
        return _entered(ParentSpan(self._tracer, opened)) if opened.is_recording() else _NOTHING

    def continuation(self, name: str, sender: TraceHeaders) -> AbstractContextManager[Span]:
        """Open this process's entry span in the sender's trace; a no-op without a sender's context."""
        return self.entry(name, dict(sender), SpanKind.SERVER) if sender else _NOTHING

    def joint_entry(
        self, name: str, senders: Sequence[TraceHeaders], attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        """Open a span for work on several messages: in the first sampled sender's trace, linked to all, or a no-op."""
        if self._tracer is None:
            return _NOTHING
        contexts = [get_current_span(_W3C.extract(dict(sender))).get_span_context() for sender in senders if sender]
        links = [Link(context) for context in contexts if context.trace_flags.sampled]
        if not links:
            return _NOTHING
        first = as_parent(NonRecordingSpan(links[0].context))
        opened = self._tracer.start_span(name, first, SpanKind.CONSUMER, attributes, links=links)
        return _entered(ParentSpan(self._tracer, opened))

    def stop(self) -> None:
        """Flush waiting spans for at most a second, and end. An export to an unresponsive collector is aborted."""
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
    under: ParentSpan | None = None,
) -> AbstractContextManager[Span]:
    """Open a span below `under`, or below the current span; a no-op span outside a trace."""
    above = under or _current.get()
    if above is None:
        return _NOTHING
    return _opened(ParentSpan(above.tracer, above.tracer.start_span(name, as_parent(above.span), kind, attributes)))


def here() -> ParentSpan | None:
    """Return the current span, to be a parent later; None outside a trace."""
    return _current.get()


def note(attributes: Attributes) -> None:
    """Add attributes to the open span, if any."""
    if (current := _current.get()) is not None:
        current.span.set_attributes(attributes)


def note_failure(kind: str, *, is_ours: bool) -> None:
    """Set `error.type` on the open span, if any; only a failure on our side sets the error status."""
    if (current := _current.get()) is not None:
        current.span.set_attribute("error.type", kind)
        if is_ours:
            current.span.set_status(Status(StatusCode.ERROR, kind))


def trace_headers() -> TraceHeaders:
    """Return the W3C context of the open span, for a message; empty outside a trace."""
    current = _current.get()
    if current is None:
        return ()
    headers: dict[str, str] = {}
    _W3C.inject(headers, as_parent(current.span))
    return tuple(headers.items())


def trace_id() -> str | None:
    """Return the id (32 hex digits) of the open span's trace; None outside a trace."""
    current = _current.get()
    return None if current is None else format_trace_id(current.span.get_span_context().trace_id)


def past_span(name: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
    """Add a finished span below the open span; times are monotonic seconds of this process. A no-op outside a trace."""
    if (current := _current.get()) is not None:
        to_unix_s = time.time() - time.monotonic()
        start_ns, end_ns = (int((moment_s + to_unix_s) * 1e9) for moment_s in (start_s, end_s))
        past = current.tracer.start_span(name, as_parent(current.span), attributes=attributes, start_time=start_ns)
        past.end(max(start_ns, end_ns))


@contextmanager
def _entered(parent: ParentSpan) -> Iterator[Span]:
    bound_id = format_trace_id(parent.span.get_span_context().trace_id)
    with structlog.contextvars.bound_contextvars(trace_id=bound_id), _opened(parent) as opened:
        yield opened


@contextmanager
def _opened(parent: ParentSpan) -> Iterator[Span]:
    before = _current.set(parent)
    try:
        yield parent.span
    except Exception as error:
        note_failure(type(error).__qualname__, is_ours=True)
        raise
    finally:
        _current.reset(before)
        parent.span.end()


if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_QUEUE_SPANS = 4_096
_BATCH_SPANS = 512
_EXPORT_EVERY_MS = 500
_EXPORT_TIMEOUT_S = 2.0


def open_tracing(endpoint: str, share: float, service: str) -> Tracing:
    """Return tracing to an OTLP collector (gRPC; `http://` plain, `https://` TLS).

    An empty endpoint turns tracing off.
    """
    if not endpoint:
        return Tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    return Tracing(provider_to(exporter, share, service), exporter.shutdown)


def provider_to(exporter: "SpanExporter", share: float, service: str) -> "TracerProvider":
    """Return a provider that samples `share` of the traces that start here, and otherwise follows the caller."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    resource = Resource.create({"service.namespace": "tailrace", "service.name": service})
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(share), resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_QUEUE_SPANS,
            schedule_delay_millis=_EXPORT_EVERY_MS,
            max_export_batch_size=_BATCH_SPANS,
        )
    )
    return provider
