"""Errors in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`, with the status that its clients expect."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.errors import ContextTooLong, ErrorKind, TailraceError
from services.gateway.call.operation import ErrorFormat
from services.gateway.openai.chunks import Json
from services.gateway.openai.schema import OpenAiErrorBody


@dataclass(frozen=True, slots=True)
class OpenAiError:
    """How OpenAI's API names one kind of error."""

    status: int
    type: str
    code: str


ERRORS = {
    ErrorKind.INVALID_REQUEST: OpenAiError(400, "invalid_request_error", "invalid_value"),
    ErrorKind.TOO_LARGE: OpenAiError(413, "invalid_request_error", "request_too_large"),
    ErrorKind.UNAUTHENTICATED: OpenAiError(401, "authentication_error", "invalid_api_key"),
    ErrorKind.NOT_ALLOWED: OpenAiError(403, "permission_error", "insufficient_permissions"),
    ErrorKind.NOT_FOUND: OpenAiError(404, "invalid_request_error", "model_not_found"),
    ErrorKind.QUOTA: OpenAiError(429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: OpenAiError(429, "rate_limit_error", "overloaded"),
    ErrorKind.AWAY: OpenAiError(503, "server_error", "unavailable"),
    ErrorKind.LATE: OpenAiError(504, "timeout_error", "deadline_exceeded"),
    ErrorKind.INTERNAL: OpenAiError(500, "server_error", "internal_error"),
}
CONTEXT_TOO_LONG = "context_length_exceeded"
"""The code by which clients know that they must shorten the conversation."""


def error_json(error: TailraceError) -> Json:
    """Return the envelope. The message includes the fix, since the envelope has no field for it."""
    known = ERRORS[error.kind]
    code = CONTEXT_TOO_LONG if isinstance(error, ContextTooLong) else known.code
    return envelope(error.summary, known.type, code, error.field)


def envelope(message: str, kind: str, code: str, field: str | None = None) -> Json:
    """Return an envelope; `kind` is one of OpenAI's types."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def openai_errors(paths: Sequence[str]) -> ErrorFormat:
    """Return the format of the door's errors; the error of an unknown path lists the known ones."""
    known = ", ".join(paths)

    def no_route(code: str, message: str, _request_id: str) -> Json:
        text = f"{message}; of OpenAI's paths these are: {known}; see /docs for all"
        return envelope(text, "invalid_request_error", code)

    return ErrorFormat(
        model=OpenAiErrorBody,
        status={kind: error.status for kind, error in ERRORS.items()},
        body=lambda error, _: error_json(error),
        no_route=no_route,
    )
