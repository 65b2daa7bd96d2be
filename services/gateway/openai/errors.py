"""Our errors in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`, with the status that its clients expect."""

from fastapi import Response

from services.errors import ContextTooLong, ErrorKind, TailraceError
from services.gateway.openai.answers import Plain
from services.gateway.rest.answers import STATUS, headers_of, json_response

_WORDS: dict[ErrorKind, tuple[str, str]] = {
    ErrorKind.INVALID_REQUEST: ("invalid_request_error", "invalid_value"),
    ErrorKind.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    ErrorKind.UNAUTHENTICATED: ("authentication_error", "invalid_api_key"),
    ErrorKind.NOT_ALLOWED: ("permission_error", "insufficient_permissions"),
    ErrorKind.NOT_FOUND: ("invalid_request_error", "model_not_found"),
    ErrorKind.QUOTA: ("rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: ("rate_limit_error", "overloaded"),
    ErrorKind.AWAY: ("server_error", "unavailable"),
    ErrorKind.LATE: ("timeout_error", "deadline_exceeded"),
    ErrorKind.INTERNAL: ("server_error", "internal_error"),
}
"""The `type` and the `code` by kind."""
CONTEXT_TOO_LONG = "context_length_exceeded"
"""The code by which clients know that they are to send less of what was said before."""


def plain_error(answer: TailraceError) -> Plain:
    """Return the envelope. The message says the fix, since the envelope has no place for it."""
    kind, code = _WORDS[answer.kind]
    return error_body(
        answer.summary, kind, CONTEXT_TOO_LONG if isinstance(answer, ContextTooLong) else code, answer.field
    )


def error_body(message: str, kind: str, code: str, field: str | None = None) -> Plain:
    """Lay an error out; `kind` is one of OpenAI's types."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def envelope(answer: TailraceError, _request_id: str) -> Response:
    """Return the answer to a request that failed before its first byte went out."""
    status = 400 if answer.kind is ErrorKind.INVALID_REQUEST else STATUS[answer.kind]
    return json_response(plain_error(answer), status, headers_of(answer))
