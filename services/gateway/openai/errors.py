"""Our errors in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`, with the status that its clients expect."""

from collections.abc import Sequence

from services.errors import ContextTooLong, ErrorKind, TailraceError
from services.gateway.call.operation import ErrorFormat
from services.gateway.openai.answer_bodies import OpenAiErrorBody
from services.gateway.openai.answers import Plain

_WORDS: dict[ErrorKind, tuple[int, str, str]] = {
    ErrorKind.INVALID_REQUEST: (400, "invalid_request_error", "invalid_value"),
    ErrorKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    ErrorKind.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    ErrorKind.NOT_ALLOWED: (403, "permission_error", "insufficient_permissions"),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error", "model_not_found"),
    ErrorKind.QUOTA: (429, "rate_limit_error", "rate_limit_exceeded"),
    ErrorKind.OVERLOADED: (429, "rate_limit_error", "overloaded"),
    ErrorKind.AWAY: (503, "server_error", "unavailable"),
    ErrorKind.LATE: (504, "timeout_error", "deadline_exceeded"),
    ErrorKind.INTERNAL: (500, "server_error", "internal_error"),
}
"""The status, the `type` and the `code` by kind."""
_STATUS = {kind: status for kind, (status, _, _) in _WORDS.items()}
CONTEXT_TOO_LONG = "context_length_exceeded"
"""The code by which clients know that they are to send less of what was said before."""


def plain_error(answer: TailraceError) -> Plain:
    """Return the envelope. The message says the fix, since the envelope has no place for it."""
    _, kind, code = _WORDS[answer.kind]
    return error_body(
        answer.summary, kind, CONTEXT_TOO_LONG if isinstance(answer, ContextTooLong) else code, answer.field
    )


def error_body(message: str, kind: str, code: str, field: str | None = None) -> Plain:
    """Lay an error out; `kind` is one of OpenAI's types."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def openai_errors(paths: Sequence[str]) -> ErrorFormat:
    """Return the format of this door's errors; a path that does not exist is answered with those that do."""
    here = ", ".join(paths)

    def no_route(code: str, message: str, _request_id: str) -> Plain:
        said = f"{message}; of OpenAI's paths these are: {here}; see /docs for all"
        return error_body(said, "invalid_request_error", code)

    return ErrorFormat(
        model=OpenAiErrorBody, status=_STATUS, body=lambda error, _: plain_error(error), no_route=no_route
    )
