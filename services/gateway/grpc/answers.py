"""Guards gRPC calls: authorizes the caller, and answers an error as a status with details and trailers.

Runs under Ray Serve's context and grpc.aio's. An error is a status on an empty message, never an exception: Ray Serve
would log a stack trace and drop the trailers. The details are sent as `google.rpc.Status` in `grpc-status-details-bin`.
Knows gRPC, but no request and no rule.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.trace import SpanKind

from services.contracts.access import Scope
from services.errors import ErrorKind, NotAllowed, TailraceError, as_tailrace_error
from services.gateway.access.authorize import Access
from services.gateway.call.headers import REQUEST_ID, Call, new_request_id, request_id_from, retry_after
from services.observability.tracing import Tracing, note, note_failure

log = structlog.get_logger()

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

_NOBODY = "unauthenticated"
M = TypeVar("M", bound=Message)
T = TypeVar("T")


class GrpcContext(Protocol):
    """The methods shared by Ray Serve's and grpc.aio's contexts."""

    def invocation_metadata(self) -> Sequence[tuple[str, Any]]:
        """Return the call's metadata."""
        ...

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status."""
        ...

    def set_details(self, details: str) -> None:
        """Set the status message."""
        ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str | bytes]]) -> None:
        """Set the trailers."""
        ...


Handler = Callable[[Call, dict[str, str]], Awaitable[M]]
"""Takes the authorized call and the metadata."""


async def guarded(
    context: GrpcContext,
    handler: Handler[M],
    empty: M,
    on_error: Callable[[str, str, str, str], None],
    *,
    access: Access,
    scope: Scope,
    act: str | None = None,
) -> M:
    """Authorize the caller, call the handler, and answer any error as a status. No stack trace leaves the process.

    Args:
        context: The call.
        handler: Answers the authorized call.
        empty: The message sent with an error.
        on_error: Called with the door, the error code, its summary and the request id.
        access: Authorizes the caller.
        scope: Required scope of the caller's key.
        act: The call's name in the audit line; None: no audit line.
    """
    call, who, outcome = Call(new_request_id()), _NOBODY, "gone"
    trailers: list[tuple[str, str | bytes]] = []
    try:
        headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        call.request_id = request_id_from(headers.get(REQUEST_ID))
        await access.authorize(call, headers, scope)
        who = call.admitted.key_id
        response = await handler(call, headers)
        outcome = "ok"
    except Exception as error:
        failure = as_tailrace_error(error)
        outcome = failure.kind.value
        who = failure.key_id if isinstance(failure, NotAllowed) else who
        if failure.kind is ErrorKind.INTERNAL:
            log.exception("unexpected_error", request_id=call.request_id, door=DOOR)
        note({"rpc.response.status_code": STATUS[failure.kind].name})
        note_failure(failure.kind.value, is_ours=failure.is_ours)
        on_error(DOOR, failure.kind.value, failure.summary, call.request_id)
        context.set_code(STATUS[failure.kind])
        context.set_details(failure.summary)
        trailers = _trailers(failure, call.request_id)
        response = empty
    finally:  # a disconnect cancels the work but does not undo it
        if act is not None:
            origin = dict(context.invocation_metadata()).get("x-forwarded-for", "unknown")
            log.warning("audit", act=act, who=who, origin=origin, outcome=outcome, request_id=call.request_id)
    context.set_trailing_metadata([*trailers, *call.limits.items(), *call.echo.items()])
    return response


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
