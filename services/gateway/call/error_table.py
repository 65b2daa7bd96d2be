"""What the error tree means to a caller: one table for both doors, in no transport's words.

Each door maps `kind` to its own numbers. What is not in the tree is our fault and says nothing of its inside.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.errors import (
    BundleError,
    ContextTooLong,
    DeadlineExceeded,
    DependencyAway,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    QuotaExceeded,
    RequestTooLarge,
    Unauthenticated,
)

_BUNDLE_RETRY_AFTER_S = 1.0


class ErrorKind(StrEnum):
    """The error codes that callers see, the same through every door."""

    INVALID_REQUEST = "invalid_request"
    TOO_LARGE = "request_too_large"
    UNAUTHENTICATED = "unauthenticated"
    NOT_ALLOWED = "not_allowed"
    NOT_FOUND = "not_found"
    QUOTA = "quota_exceeded"
    OVERLOADED = "overloaded"
    AWAY = "dependency_away"
    LATE = "deadline_exceeded"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """One error as a caller sees it. `field` and `fix` are there when the caller can mend it, `retry_after_s` when time can.

    `is_context_too_long` is for the door whose clients look for it; elsewhere it is an invalid request like any other.
    """

    kind: ErrorKind
    message: str
    field: str | None = None
    fix: str | None = None
    retry_after_s: float | None = None
    is_context_too_long: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether the fault is on our side, not the caller's."""
        return self.kind in {ErrorKind.AWAY, ErrorKind.LATE, ErrorKind.INTERNAL}

    @property
    def sentence(self) -> str:
        """Everything in one line, for doors and logs that have only a line."""
        return "; ".join(
            part for part in (f"{self.field}: {self.message}" if self.field else self.message, self.fix) if part
        )


def describe(error: Exception) -> ErrorAnswer:
    """Return the caller's view of an error."""
    match error:
        case InvalidRequest():
            return ErrorAnswer(
                kind=ErrorKind.INVALID_REQUEST,
                message=error.problem,
                field=error.field,
                fix=error.fix,
                is_context_too_long=isinstance(error, ContextTooLong),
            )
        case RequestTooLarge():
            return ErrorAnswer(
                kind=ErrorKind.TOO_LARGE,
                message=f"larger than {error.max_bytes} bytes",
                field=error.field,
                fix="send less per request",
            )
        case Unauthenticated():
            return ErrorAnswer(kind=ErrorKind.UNAUTHENTICATED, message=str(error))
        case NotAllowed():
            return ErrorAnswer(kind=ErrorKind.NOT_ALLOWED, message=str(error))
        case NotFound():
            return ErrorAnswer(kind=ErrorKind.NOT_FOUND, message=error.what, fix=error.fix)
        case QuotaExceeded():
            return ErrorAnswer(
                kind=ErrorKind.QUOTA, message=f"this key's {error.what} is used up", retry_after_s=error.retry_after_s
            )
        case Overloaded():
            return ErrorAnswer(
                kind=ErrorKind.OVERLOADED, message=f"{error.what} is overloaded", retry_after_s=error.retry_after_s
            )
        case DependencyAway():
            return ErrorAnswer(
                kind=ErrorKind.AWAY, message=f"{error.dependency} is away", retry_after_s=error.retry_after_s
            )
        case BundleError():
            return ErrorAnswer(kind=ErrorKind.AWAY, message="bundle is away", retry_after_s=_BUNDLE_RETRY_AFTER_S)
        case DeadlineExceeded():
            return ErrorAnswer(kind=ErrorKind.LATE, message=f"{error.stage}: the deadline passed")
        case _:
            return ErrorAnswer(kind=ErrorKind.INTERNAL, message="something broke on our side; it is logged")
