"""Finished spans for tests: kept in memory, and found by name."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from services.observability.tracing import Tracing


class Recorder:
    """Tracing whose finished spans tests can read."""

    def __init__(self, share: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(share), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def one(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (match,) = [span for span in self.spans if span.name == name]
        return match

    def tree(self) -> dict[str, str | None]:
        """The name of each span's parent; None without a parent in this process."""
        names = {span_id(span): span.name for span in self.spans}
        return {span.name: names.get(span.parent.span_id) if span.parent else None for span in self.spans}


def span_id(span: ReadableSpan) -> int:
    """The span's own id."""
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def trace_id_of(span: ReadableSpan) -> int:
    """The id of the span's trace."""
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def traceparent(trace_id: int = 0xA1, parent_id: int = 0xB2, *, sampled: bool = True) -> str:
    return f"00-{trace_id:032x}-{parent_id:016x}-{int(sampled):02x}"
