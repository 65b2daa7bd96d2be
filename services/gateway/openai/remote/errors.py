"""Map the errors of another OpenAI-compatible server to ours: by HTTP status, or by an error event within a stream.

Pure. A caller's error is passed on and does not count against the server; any other failure means that the server is
unavailable. The cause is in the error's notes, for the operator's log: for example that the server refuses our API key.
"""

from collections.abc import Mapping
from typing import Any

import pydantic_core

from services.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    NotFound,
    Overloaded,
    TailraceError,
)
from services.gateway.openai.operations import CONTEXT_TOO_LONG

_RETRY_AFTER_S = 1.0
_MAX_MESSAGE_CHARS = 500
_STATUS_OF_TYPE = {"invalid_request_error": 400, "rate_limit_error": 429, "timeout_error": 504}
"""Status of an error event whose code is not a status, by OpenAI's types."""
_DEFAULT_STATUS = 500
_TOO_LONG = ("maximum context length", "maximum model length")
"""Phrases of OpenAI's and vLLM's messages for a prompt that is too long, independent of the code."""


def unavailable(cause: str, retry_after_s: float = _RETRY_AFTER_S) -> DependencyUnavailable:
    """Return the error with the cause as a note."""
    error = DependencyUnavailable("text", retry_after_s)
    error.add_note(cause)
    return error


def error_of_response(status: int, headers: Mapping[str, str], body: bytes) -> TailraceError:
    """Return the error for a status other than 200. A rejected API key of ours is not the caller's error."""
    try:
        parsed = pydantic_core.from_json(body)
    except ValueError:
        parsed = {}
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else {}
    return _error_of(status, error, _retry_after_s(headers))


def error_of_event(event: Any) -> TailraceError:
    """Return the error for an error event. Its `code` is an HTTP status in vLLM and a word in OpenAI's API."""
    fields = event if isinstance(event, dict) else {}
    code, kind = fields.get("code"), str(fields.get("type"))
    status = code if isinstance(code, int) else _STATUS_OF_TYPE.get(kind, _DEFAULT_STATUS)
    return _error_of(status, event, _RETRY_AFTER_S)


def _error_of(status: int, error: Any, retry_after_s: float) -> TailraceError:
    fields = error if isinstance(error, dict) else {"message": error}
    message = str(fields.get("message") or f"the text server said {status}")[:_MAX_MESSAGE_CHARS]
    field = str(fields.get("param") or "body")
    match status:
        case 400 | 413 | 422:
            kind = ContextTooLong if _is_too_long(fields.get("code"), message) else InvalidRequest
            return kind(field, message.removeprefix(f"{field}: "), "see what the text server says")
        case 404:
            return NotFound(message, "see /v1/models")
        case 429:
            return Overloaded("text", retry_after_s)
        case 408 | 504:
            return DeadlineExceeded("text")
        case _:
            return unavailable(f"{status}: {message}", retry_after_s)


def _is_too_long(code: object, message: str) -> bool:
    return code == CONTEXT_TOO_LONG or any(phrase in message.lower() for phrase in _TOO_LONG)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else _RETRY_AFTER_S
