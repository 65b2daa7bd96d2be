"""The span of one call at a door, by the words of OpenTelemetry's conventions for HTTP and RPC.

Goes on with the caller's trace when there is one. Switched off, it awaits the answer and does nothing else.
"""

from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request, Response
from opentelemetry.trace import SpanKind

from services.gateway.grpc.answers import CallContext
from services.observability.tracing import Tracing

T = TypeVar("T")


async def traced_http(tracing: Tracing, http: Request, route: str, answering: Awaitable[Response]) -> Response:
    """Await the answer inside a span of this request."""
    if tracing.is_off:
        return await answering
    about = {"http.request.method": http.method, "http.route": route, "url.path": http.url.path}
    with tracing.entry(f"{http.method} {route}", http.headers, SpanKind.SERVER, about) as opened:
        response = await answering
        opened.set_attribute("http.response.status_code", response.status_code)
        return response


async def traced_rpc(tracing: Tracing, context: CallContext, method: str, answering: Awaitable[T]) -> T:
    """Await the answer inside a span of this call; a refusal overwrites its status."""
    if tracing.is_off:
        return await answering
    metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    about = {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": "OK"}
    with tracing.entry(method, metadata, SpanKind.SERVER, about):
        return await answering
