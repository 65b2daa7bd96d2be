"""What another server refuses or fails with, as errors of ours: by status, or by an event within a stream. Pure.

A caller's mistake stays the caller's, and says nothing against the server; whatever else goes wrong there is a server that is
away, to our callers. Why it is, is in the error's notes, for our operator: a key of ours that it refuses, for example.
"""

from collections.abc import Mapping
from typing import Any

import pydantic_core

from services.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DependencyAway,
    InvalidRequest,
    NotFound,
    Overloaded,
    TailraceError,
)
from services.gateway.openai.errors import CONTEXT_TOO_LONG

_AWAY_S = 1.0
_MAX_SAID = 500
_STATUS_OF_TYPE = {"invalid_request_error": 400, "rate_limit_error": 429, "timeout_error": 504}
"""The status that an error event stands for where its code is none, by OpenAI's types."""
_UNKNOWN = 500
_TOO_LONG = ("maximum context length", "maximum model length")
"""What OpenAI's and vLLM's messages say of a prompt that is too long, be their code another."""


def away(why: str, retry_after_s: float = _AWAY_S) -> DependencyAway:
    """Make the error, with a note that says why."""
    error = DependencyAway("text", retry_after_s)
    error.add_note(why)
    return error


def refusal_of(status: int, headers: Mapping[str, str], body: bytes) -> TailraceError:
    """Return the error that a status other than 200 means to our caller. Our own key's refusal is our operator's matter."""
    try:
        told = pydantic_core.from_json(body)
    except ValueError:
        told = {}
    error = told.get("error", told) if isinstance(told, dict) else {}
    return _error_of(status, error, _retry_after_s(headers))


def refusal_in(event: Any) -> TailraceError:
    """Return the error that an error event means; its code is a status where the server is vLLM."""
    told = event if isinstance(event, dict) else {}
    code, kind = told.get("code"), str(told.get("type"))
    return _error_of(code if isinstance(code, int) else _STATUS_OF_TYPE.get(kind, _UNKNOWN), event, _AWAY_S)


def _error_of(status: int, error: Any, retry_after_s: float) -> TailraceError:
    told = error if isinstance(error, dict) else {"message": error}
    message = str(told.get("message") or f"the text server said {status}")[:_MAX_SAID]
    field = str(told.get("param") or "body")
    match status:
        case 400 | 413 | 422:
            kind = ContextTooLong if _is_too_long(told.get("code"), message) else InvalidRequest
            return kind(field, message.removeprefix(f"{field}: "), "see what the text server says")
        case 404:
            return NotFound(message, "see /v1/models")
        case 429:
            return Overloaded("text", retry_after_s)
        case 408 | 504:
            return DeadlineExceeded("text")
        case _:
            return away(f"{status}: {message}", retry_after_s)


def _is_too_long(code: object, message: str) -> bool:
    return code == CONTEXT_TOO_LONG or any(words in message.lower() for words in _TOO_LONG)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else _AWAY_S
