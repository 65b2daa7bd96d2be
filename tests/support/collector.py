"""An OTLP collector for tests: a real gRPC server for OpenTelemetry's TraceService that keeps its input."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as api
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.servers import HOST, free_port
from tests.support.wait import wait_for


class Collector(api.TraceServiceServicer):
    """Listens on its own port from the start; while `go_on` is cleared it answers no call."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self._received: list[tuple[str, Span]] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        api.add_TraceServiceServicer_to_server(self, self._server)
        self._port = free_port()
        assert self._server.add_insecure_port(f"{HOST}:{self._port}")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self._port}"

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Take spans in."""
        self.go_on.wait()
        for batch in request.resource_spans:
            about = {attribute.key: attribute.value.string_value for attribute in batch.resource.attributes}
            for scope in batch.scope_spans:
                self._received += [(about["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def spans(self, trace_id: int) -> dict[str, tuple[str, Span]]:
        """Return the service and the span of this trace by span name."""
        wanted = trace_id.to_bytes(16, "big")
        return {span.name: (service, span) for service, span in list(self._received) if span.trace_id == wanted}

    def wait_for(self, trace_id: int, *names: str, timeout_s: float = 60.0) -> dict[str, tuple[str, Span]]:
        """Wait until the trace has spans of these names, and return all of its spans."""
        missing: Callable[[], set[str]] = lambda: set(names) - set(self.spans(trace_id))  # noqa: E731
        wait_for(lambda: not missing(), timeout_s, f"spans of {trace_id:x}")
        return self.spans(trace_id)

    def stop(self) -> None:
        """Answer the waiting calls and stop."""
        self.go_on.set()
        self._server.stop(None).wait()
