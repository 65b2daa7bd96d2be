"""Rate limits by key: a token bucket for its rate, a count for its day (UTC). Pure: the time is an argument.

Counts in one process, for the times when the shared counts are unavailable: see `shared_rates`. A refused call uses nothing.
"""

from dataclasses import dataclass

from services.contracts.rates import DAY_S, QUOTA, RATE, WHOLE, Allowance
from services.errors import QuotaExceeded


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
        if used.tokens < needed - WHOLE:
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
