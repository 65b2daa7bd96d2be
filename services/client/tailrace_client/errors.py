"""The one error of the calls. What it holds is the same over REST and gRPC."""

RETRIED = frozenset({"unreachable", "dependency_away"})
"""Codes of errors that are retried in any case."""

RETRIED_AFTER = frozenset({"overloaded", "quota_exceeded"})
"""Codes of errors that are retried only after the time that the server named."""


class TailraceError(Exception):
    """A call failed.

    Attributes:
        code: One of the server's codes (invalid_request, request_too_large, unauthenticated, not_allowed, not_found,
            quota_exceeded, overloaded, dependency_away, deadline_exceeded, internal), or "unreachable": no answer came.
        message: What is wrong, in one sentence.
        field: The field of the request that is wrong.
        fix: What to send instead.
        retry_after_s: When a retry may succeed.
        request_id: The request's id, which the server logs.
        num_attempts: How often the request was sent.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        fix: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        where = f"{field}: " if field else ""
        what = f"; {fix}" if fix else ""
        super().__init__(f"{code}: {where}{message}{what}")
        self.code = code
        self.message = message
        self.field = field
        self.fix = fix
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.num_attempts = 1


def late() -> TailraceError:
    """Return the error of a call whose deadline passed here, without an answer."""
    return TailraceError("deadline_exceeded", "no answer came before the deadline")
