"""Rate limits by key: a token bucket for its rate, a count for its day (UTC). Pure: the time is an argument.

Counts in one process, for the times when the shared counts are unavailable: see `shared_rates`. A refused call uses nothing.
"""

from dataclasses import dataclass

from services.errors import QuotaExceeded

DAY_S = 86_400
RATE, QUOTA = "rate", "daily quota"
_WHOLE = 1e-9
"""The rounding error of a sum of floats: a token that is less than this short of whole is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A key's limits. `burst` calls may arrive at once; None means no limit."""

    rate_per_s: float | None = None
    burst: float = 1.0
    daily_quota: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return self.rate_per_s is not None or self.daily_quota is not None

    @property
    def max_cost(self) -> int:
        """The most that one call may ever cost."""
        burst = int(self.burst + _WHOLE)
        if self.daily_quota is None:
            return burst
        return self.daily_quota if self.rate_per_s is None else min(burst, self.daily_quota)

    def shared_by(self, num_processes: int) -> "Allowance":
        """Return each process's share; a burst stays at least one call, and a quota is rounded up."""
        rate, quota = self.rate_per_s, self.daily_quota
        return Allowance(
            rate_per_s=None if rate is None else rate / num_processes,
            burst=max(1.0, self.burst / num_processes),
            daily_quota=None if quota is None else -(-quota // num_processes),
        )


@dataclass(frozen=True, slots=True)
class Left:
    """What a key has left: `tokens` in its bucket (a full one without a rate), and its calls of the day so far."""

    tokens: float
    today: int


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

    def spend(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float, cost: int = 1) -> Left:
        """Count a call. Raises QuotaExceeded with the time to the next permitted one. `now_s` is monotonic, for the rate."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        needed = min(
            cost, allowance.burst
        )  # a call that costs more than this process's share passes with a full bucket
        if used.tokens < needed - _WHOLE:
            raise QuotaExceeded(RATE, (needed - used.tokens) / (allowance.rate_per_s or 1.0))
        if allowance.daily_quota is not None and used.today + cost > allowance.daily_quota:
            raise QuotaExceeded(QUOTA, (used.day + 1) * DAY_S - now_unix_s)
        used.tokens -= cost
        used.today += cost
        return Left(max(0.0, used.tokens), used.today)

    def left(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> Left:
        """Return what the key has left."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        return Left(max(0.0, used.tokens), used.today)

    def note(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float, cost: int) -> None:
        """Count a call that was permitted elsewhere."""
        used = self._brought_up(key_id, allowance, now_unix_s, now_s)
        used.tokens = max(0.0, used.tokens - cost)
        used.today += cost

    def today(self, key_id: str, now_unix_s: float) -> int:
        """Return the calls of this day so far."""
        used = self._used.get(key_id)
        return 0 if used is None or used.day != int(now_unix_s // DAY_S) else used.today

    def _brought_up(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> _Used:
        """Return the key's counts with the tokens of this time; a full bucket when there is no rate."""
        day = int(now_unix_s // DAY_S)
        used = self._used.get(key_id)
        if used is None:
            used = self._used[key_id] = _Used(allowance.burst, now_s, day)
        elif used.day != day:
            used.day, used.today = day, 0
        gained = 0.0 if allowance.rate_per_s is None else max(0.0, now_s - used.at_s) * allowance.rate_per_s
        used.tokens = allowance.burst if allowance.rate_per_s is None else min(allowance.burst, used.tokens + gained)
        used.at_s = now_s
        return used
