"""Rate limits by key: a token bucket for its rate, a count for its day (UTC). Pure: the time is an argument.

Counts per process: rates and quotas are divided by the number of processes that share the callers, and a restarted process
starts from zero. A refused call uses nothing.
"""

from dataclasses import dataclass

from services.errors import QuotaExceeded

DAY_S = 86_400
_WHOLE = 1.0 - 1e-9
"""A full token, within the rounding error of a sum of floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A key's limits. `burst` calls may arrive at once; None means no limit."""

    rate_per_s: float | None = None
    burst: float = 1.0
    daily_quota: int | None = None

    def shared_by(self, num_processes: int) -> "Allowance":
        """Return each process's share; a burst stays at least one call, and a quota is rounded up."""
        rate, quota = self.rate_per_s, self.daily_quota
        return Allowance(
            rate_per_s=None if rate is None else rate / num_processes,
            burst=max(1.0, self.burst / num_processes),
            daily_quota=None if quota is None else -(-quota // num_processes),
        )


@dataclass(slots=True)
class _Used:
    """The tokens left in one key's bucket, and its calls of the day."""

    tokens: float
    at_s: float
    day: int
    today: int = 0


class Rates:
    """Counts calls by key. Owned by one event loop."""

    def __init__(self) -> None:
        self._used: dict[str, _Used] = {}

    def spend(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> None:
        """Count one call. Raises QuotaExceeded with the time to the next permitted one. `now_s` is monotonic, for the rate."""
        day = int(now_unix_s // DAY_S)
        used = self._used.get(key_id)
        if used is None:
            used = self._used[key_id] = _Used(allowance.burst, now_s, day)
        elif used.day != day:
            used.day, used.today = day, 0
        tokens = _refilled(used, allowance, now_s)
        if tokens < _WHOLE:
            raise QuotaExceeded("rate", (1.0 - tokens) / (allowance.rate_per_s or 1.0))
        if allowance.daily_quota is not None and used.today >= allowance.daily_quota:
            raise QuotaExceeded("daily quota", (day + 1) * DAY_S - now_unix_s)
        used.tokens, used.at_s = tokens - 1.0, now_s
        used.today += 1


def _refilled(used: _Used, allowance: Allowance, now_s: float) -> float:
    """Return the tokens in the bucket now; a full one when there is no rate."""
    if allowance.rate_per_s is None:
        return allowance.burst
    return min(allowance.burst, used.tokens + max(0.0, now_s - used.at_s) * allowance.rate_per_s)
