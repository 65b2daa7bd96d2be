"""How spans leave a process: sampled, queued within bounds, and sent to an OTLP collector by a thread of their own.

The SDK and its exporter are imported only where there is somewhere to send to. What does not fit in the queue, and what the
collector does not take in time, is lost.
"""

from typing import TYPE_CHECKING

from services.observability.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_QUEUE_SPANS = 4_096
_BATCH_SPANS = 512
_EXPORT_EVERY_MS = 500
_EXPORT_TIMEOUT_S = 2.0


def open_tracing(endpoint: str, share: float, service: str, version: str = "") -> Tracing:
    """Open the way to an OTLP collector (gRPC; `http://` plain, `https://` TLS). An empty endpoint gives tracing that is off."""
    if not endpoint:
        return Tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    return Tracing(provider_to(exporter, share, service, version), exporter.shutdown)


def provider_to(exporter: "SpanExporter", share: float, service: str, version: str = "") -> "TracerProvider":
    """Make a provider that samples `share` of the traces that begin here, and follows the caller in others."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    about = {"service.namespace": "tailrace", "service.name": service, "service.version": version}
    resource = Resource.create({name: text for name, text in about.items() if text})
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
