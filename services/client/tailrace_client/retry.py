"""The error of all calls, and whether and when to retry a failed attempt. Pure: times and randomness are arguments.

Failed connections, 503 or UNAVAILABLE, and refusals that name a time within the deadline are retried. Each retry waits
a random time (full jitter) and takes a token from a bucket that all calls of a client share, so that retries stay a
small part of the load while a server is down.
"""

import threading
from dataclasses import dataclass

_RETRIED = frozenset({"unreachable", "unavailable"})
"""Codes of errors that are always retried."""

_RETRIED_AFTER = frozenset({"overloaded", "quota_exceeded"})
"""Codes of errors that are retried only after the time that the server named."""


class TailraceError(Exception):
    """A call failed. The attributes are the same over REST and gRPC.

    Attributes:
        code: A server code (invalid_request, request_too_large, unauthenticated, not_allowed, not_found,
            quota_exceeded, overloaded, unavailable, deadline_exceeded, internal), or "unreachable": no answer came.
        message: The problem, in one sentence.
        field: The invalid field of the request.
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
        num_attempts: int = 1,
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
        self.num_attempts = num_attempts


def late(before: TailraceError | None = None) -> TailraceError:
    """Return the error of a call whose deadline passed here without an answer.

    It quotes the previous attempt's error, if any. After an unreachable attempt the code stays "unreachable": gRPC
    waits for a connection until the deadline, whereas REST fails at once.
    """
    if before is not None and before.code == "unreachable":
        return TailraceError(before.code, f"{before.message}; no answer came before the deadline")
    earlier = "" if before is None else f"; the attempt before: {before.message}"
    return TailraceError("deadline_exceeded", f"no answer came before the deadline{earlier}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How a client waits and retries.

    Attributes:
        retry_share: Retries per call, in the long run.
        retry_reserve: Retries that a client may make beyond that rate, in bursts.
        first_pause_ms: Upper bound of the random pause before the first retry; doubles with each retry.
        longest_pause_ms: Maximum of the doubled pause.
        network_ms: Part of each deadline reserved for the network: the server gets the remaining time minus this.
        grace_ms: How long to wait after the deadline for an answer in flight, without retries.
    """

    retry_share: float = 0.1
    retry_reserve: int = 10
    first_pause_ms: float = 20.0
    longest_pause_ms: float = 1_000.0
    network_ms: float = 10.0
    grace_ms: float = 0.0


DEFAULTS = CallOptions()


class RetryBudget:
    """A token bucket: each call adds `retry_share`, each retry takes one token. Thread-safe."""

    def __init__(self, options: CallOptions) -> None:
        self._share = options.retry_share
        self._most = self._tokens = float(options.retry_reserve)
        self._lock = threading.Lock()

    def deposit(self) -> None:
        """Count one call."""
        with self._lock:
            self._tokens = min(self._most, self._tokens + self._share)

    def withdraw(self) -> bool:
        """Take the token of one retry, if available."""
        with self._lock:
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True


class Attempts:
    """The attempts of one call, from its start to its deadline; times are seconds of one monotonic clock."""

    def __init__(self, options: CallOptions, budget: RetryBudget, deadline_ms: float, now_s: float) -> None:
        self._options = options
        self._budget = budget
        self._ends_s = now_s + deadline_ms / 1_000
        self._earlier: TailraceError | None = None
        self.num = 1
        budget.deposit()

    def left_s(self, now_s: float) -> float:
        """Return how long this attempt may still take. Raises the error of a passed deadline."""
        left_s = self._ends_s + self._options.grace_ms / 1_000 - now_s
        if left_s <= 0:
            raise late(self._earlier)
        return left_s

    def server_deadline_ms(self, now_s: float) -> int:
        """Return the deadline to send to the server."""
        return max(1, round(1_000 * (self._ends_s - now_s) - self._options.network_ms))

    def pause_s(self, error: TailraceError, chance: float, now_s: float) -> float:
        """Return how long to wait before the next attempt; `chance` is uniform in 0 to 1.

        Raises the error itself if no attempt follows: a retry would not help, would come too late, or the budget
        is spent. Its cause is the error of the previous attempt.
        """
        is_late = error.code == "deadline_exceeded"
        if is_late and error.request_id is None and self._earlier is not None:
            error = late(self._earlier)
        error.num_attempts = self.num
        may_help = error.code in _RETRIED or (error.code in _RETRIED_AFTER and error.retry_after_s is not None)
        if is_late or not may_help:
            raise error from self._earlier
        longest_ms = min(self._options.longest_pause_ms, self._options.first_pause_ms * 2.0 ** min(self.num - 1, 16))
        pause_s: float = (error.retry_after_s or 0.0) + chance * longest_ms / 1_000
        if now_s + pause_s >= self._ends_s or not self._budget.withdraw():
            raise error from self._earlier
        self._earlier = error
        self.num += 1
        return pause_s
