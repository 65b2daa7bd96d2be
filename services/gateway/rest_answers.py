"""What the REST door gives back: JSON, and every error in one envelope with its status and headers.

Knows HTTP; knows no request and no rule.
"""

import json
import math
from collections.abc import Awaitable, Callable

import structlog
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.gateway.caller import Call, new_request_id, request_id_from
from services.gateway.error_table import ErrorAnswer, ErrorKind, describe

log = structlog.get_logger()

DOOR = "rest"
STATUS = {
    ErrorKind.INVALID_REQUEST: 422,
    ErrorKind.TOO_LARGE: 413,
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
) -> Response:
    """Do the work; turn whatever it raises into the envelope, and tell `refused` (door, code, message, request id).

    The last resort: no stack trace ever leaves the door.
    """
    call = Call(new_request_id())
    try:
        call.request_id = request_id_from(http.headers)
        response = await work(call)
    except ClientDisconnect:
        return Response(status_code=_CLIENT_GONE)
    except Exception as error:
        answer = describe(error)
        if answer.kind is ErrorKind.INTERNAL:
            log.exception("unexpected_error", request_id=call.request_id, door=DOOR)
        if refused is not None:
            refused(DOOR, answer.kind.value, answer.sentence, call.request_id)
        response = _envelope(STATUS[answer.kind], answer, call.request_id)
    if http.app.state.echoes_request_id:
        response.headers.update(call.echo)
    return response


def json_response(body: object, status: int = 200) -> Response:
    """Write plain values as compact JSON."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _envelope(status: int, answer: ErrorAnswer, request_id: str) -> Response:
    error = {"code": answer.kind, "message": answer.message, "field": answer.field, "fix": answer.fix}
    response = json_response({"error": {**error, "request_id": request_id}}, status)
    if answer.retry_after_s is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(answer.retry_after_s)))
    return response


async def no_route(http: Request, error: Exception) -> Response:
    """Answer for paths and methods that do not exist, in the envelope."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    kind = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    message = f"{http.method} {http.url.path} is not here"
    body = {"code": kind, "message": message, "field": None, "fix": "see /docs", "request_id": new_request_id()}
    return json_response({"error": body}, status)
