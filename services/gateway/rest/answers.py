"""What the REST door gives back: JSON, and every error in one envelope with its status and headers.

Knows HTTP; knows no request and no rule.
"""

import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping

import structlog
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.contracts.access import Scope
from services.errors import ErrorKind, InvalidRequest, NotAllowed, TailraceError, as_tailrace_error
from services.gateway.access.audit import NOBODY, audit
from services.gateway.call.headers import Call, new_request_id, request_id_from
from services.observability.tracing import note_failure

log = structlog.get_logger()

DOOR = "rest"
STATUS = {
    ErrorKind.INVALID_REQUEST: 422,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.UNAUTHENTICATED: 401,
    ErrorKind.NOT_ALLOWED: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.QUOTA: 429,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.AWAY: 503,
    ErrorKind.LATE: 504,
    ErrorKind.INTERNAL: 500,
}
_CLIENT_GONE = 499


async def guarded(
    http: Request,
    work: Callable[[Call], Awaitable[Response]],
    refused: Callable[[str, str, str, str], None] | None = None,
    *,
    scope: Scope,
    audited: bool | None = None,
    enveloped: Callable[[TailraceError, str], Response] | None = None,
) -> Response:
    """Let in who may, do the work, and turn whatever is raised into the envelope. No stack trace ever leaves the door.

    Args:
        http: The request.
        work: Is given the call, its `caller` included; nothing of the request's body was read before.
        refused: Is told of an error: door, code, message, request id.
        scope: What the caller's key must allow.
        audited: Whether an audit line is written; by default for everything that needs the scope admin.
        enveloped: Makes the response of an error and a request id; by default this door's own envelope.
    """
    call, who, outcome = Call(new_request_id()), NOBODY, "gone"
    try:
        call.request_id = request_id_from(http.headers)
        call.caller = http.app.state.access.authorize(http.headers, scope)
        who = call.admitted.key_id
        response = await work(call)
        outcome = "ok"
    except ClientDisconnect:
        return Response(status_code=_CLIENT_GONE)
    except Exception as error:
        answer = as_tailrace_error(error)
        outcome = answer.kind.value
        note_failure(outcome, is_ours=answer.is_ours)
        who = error.key_id if isinstance(error, NotAllowed) else who
        if answer.kind is ErrorKind.INTERNAL:
            log.exception("unexpected_error", request_id=call.request_id, door=DOOR)
        if refused is not None:
            refused(DOOR, answer.kind.value, answer.summary, call.request_id)
        response = (enveloped or _envelope)(answer, call.request_id)
    finally:  # a caller who leaves takes the work away, but not what it has done by then
        if scope is Scope.ADMIN if audited is None else audited:
            _audit(http, who, outcome, call.request_id)
    if http.app.state.echoes_request_id:
        response.headers.update(call.echo)
    return response


def _audit(http: Request, who: str, outcome: str, request_id: str) -> None:
    origin = http.headers.get("x-forwarded-for") or (http.client.host if http.client else "unknown")
    audit(act=f"{http.method} {http.url.path}", who=who, origin=origin, outcome=outcome, request_id=request_id)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Write plain values as compact JSON."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")


def _envelope(answer: TailraceError, request_id: str) -> Response:
    body = _error_body(answer.kind, answer.problem, answer.field, answer.fix, request_id)
    return json_response(body, STATUS[answer.kind], headers_of(answer))


def _error_body(code: str, message: str, field: str | None, fix: str | None, request_id: str) -> dict[str, object]:
    return {"error": {"code": code, "message": message, "field": field, "fix": fix, "request_id": request_id}}


def headers_of(answer: TailraceError) -> dict[str, str]:
    """Return the headers that belong to an error: when to come back, or how to prove who one is."""
    headers: dict[str, str] = {}
    if answer.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(answer.retry_after_s)))
    if answer.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


async def no_route(
    http: Request, error: Exception, told: Callable[[str, str], dict[str, object]] | None = None
) -> Response:
    """Answer for paths and methods that do not exist. A 405 names the methods that do.

    `told` makes another door's body of a code and a message; by default it is this door's own envelope.
    """
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    message, call = f"{http.method} {http.url.path} is not here", Call(_id_of(http))
    own = _error_body(code, message, None, "see /docs", call.request_id)
    response = json_response(own if told is None else told(code, message), status, headers)
    if http.app.state.echoes_request_id:
        response.headers.update(call.echo)
    return response


def _id_of(http: Request) -> str:
    """Return the caller's request id, or a new one in the place of none and of a bad one."""
    with contextlib.suppress(InvalidRequest):
        return request_id_from(http.headers)
    return new_request_id()
