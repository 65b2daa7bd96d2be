"""Answers gRPC calls: guards each, and sends an error as a status with details and trailers.

Runs under Ray Serve's context and grpc.aio's. An error is a status on an empty message, never an exception: Ray Serve
would log a stack trace and drop the trailers. The details are sent as `google.rpc.Status` in `grpc-status-details-bin`.
Knows gRPC, but no request and no rule.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.trace import SpanKind

from services.errors import ErrorKind, TailraceError
from services.gateway.call.guard import Access, OnError, guard
from services.gateway.call.headers import REQUEST_ID, Call, new_request_id, request_id_from, retry_after
from services.gateway.call.operation import Operation
from services.observability.tracing import Tracing, note

DOOR = "grpc"
DOMAIN = "tailrace"
"""Domain of the error codes in `google.rpc.ErrorInfo`."""
STATUS = {
    ErrorKind.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
}

SERVICE = "tailrace.v1.Recommender"
M = TypeVar("M", bound=Message)
T = TypeVar("T")


class GrpcContext(Protocol):
    """The methods shared by Ray Serve's and grpc.aio's contexts."""

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str | bytes]]) -> None: ...


Handler = Callable[[Call, dict[str, str]], Awaitable[M]]
"""Takes the authorized call and the metadata."""


async def guarded(
    operation: Operation,
    context: GrpcContext,
    handler: Handler[M],
    empty: M,
    access: Access,
    on_error: OnError | None = None,
) -> M:
    """Guard a call of an operation. An error is a status on the empty message."""
    call, trailers = Call(new_request_id()), list[tuple[str, str | bytes]]()
    headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}

    async def admit() -> None:
        call.request_id = request_id_from(headers.get(REQUEST_ID))
        await access.authorize(call, headers, operation)

    def refuse(failure: TailraceError) -> M:
        note({"rpc.response.status_code": STATUS[failure.kind].name})
        context.set_code(STATUS[failure.kind])
        context.set_details(failure.summary)
        trailers.extend(_trailers(failure, call.request_id))
        return empty

    response = await guard(
        call,
        admit,
        lambda: handler(call, headers),
        refuse,
        door=DOOR,
        act=method_of(operation) if operation.is_audited else None,
        origin=lambda: headers.get("x-forwarded-for", "unknown"),
        on_error=on_error,
    )
    context.set_trailing_metadata([*trailers, *call.limits.items(), *call.echo.items()])
    return response


def method_of(operation: Operation) -> str:
    """Return the full name of an operation's method."""
    assert operation.rpc is not None, "the gRPC door serves operations with a method"
    return f"{SERVICE}/{operation.rpc.method}"


async def traced(tracing: Tracing, context: GrpcContext, method: str, answering: Awaitable[T]) -> T:
    """Await the answer inside a span, by OpenTelemetry's RPC conventions; a refusal overwrites its status."""
    if tracing.is_off:
        return await answering
    metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    about = {"rpc.system.name": "grpc", "rpc.method": method, "rpc.response.status_code": "OK"}
    with tracing.entry(method, metadata, SpanKind.SERVER, about):
        return await answering


def _trailers(failure: TailraceError, request_id: str) -> list[tuple[str, str | bytes]]:
    """Return the machine-readable error details: code and fix, request id, field, and retry delay."""
    status = status_pb2.Status(code=STATUS[failure.kind].value[0], message=failure.summary)
    metadata = {"message": failure.problem} | ({"fix": failure.fix} if failure.fix else {})
    info = error_details_pb2.ErrorInfo(reason=failure.kind.value.upper(), domain=DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    if failure.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=failure.field, description=f"{failure.problem}; {failure.fix}", reason=failure.kind.value.upper()
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    trailers: list[tuple[str, str | bytes]] = []
    if failure.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(int(failure.retry_after_s * 1_000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers.append(("retry-after", retry_after(failure.retry_after_s)))
    trailers.append(("grpc-status-details-bin", status.SerializeToString()))
    return trailers
