"""How much each key has used: a token bucket for its rate, a count for its day (UTC). Pure: the time is an argument.

Holds for one process. Rates are divided by the number of processes that share the callers; days may be counted together
by whoever tells this one what the others have used (`learn`). A call that is refused here uses up nothing.
"""

from dataclasses import dataclass

from services.errors import QuotaExceeded

DAY_S = 86_400
_WHOLE = 1.0 - 1e-9
"""A token that was waited for is there, whatever a sum of floats makes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a key may use. `burst` calls may come at once; None means no limit."""

    rate_per_s: float | None = None
    burst: float = 1.0
    daily_quota: int | None = None

    def shared_by(self, num_processes: int) -> "Allowance":
        """Give each process's part of the rate; a burst stays at least one call. The quota of a day is not divided."""
        if self.rate_per_s is None:
            return self
        burst = max(1.0, self.burst / num_processes)
        return Allowance(rate_per_s=self.rate_per_s / num_processes, burst=burst, daily_quota=self.daily_quota)


@dataclass(slots=True)
class _Used:
    """What one key has used. `elsewhere` counts the day's calls that others have told of."""

    tokens: float
    at_s: float
    day: int
    here: int = 0
    elsewhere: int = 0


class Rates:
    """Counts calls by key. Owned by one event loop."""

    def __init__(self) -> None:
        self._used: dict[str, _Used] = {}

    def spend(self, key_id: str, allowance: Allowance, now_unix_s: float, now_s: float) -> None:
        """Count one call. Raises QuotaExceeded saying when the next one may come. `now_s` is monotonic, for the rate."""
        day = int(now_unix_s // DAY_S)
        used = self._used.get(key_id)
        if used is None:
            used = self._used[key_id] = _Used(allowance.burst, now_s, day)
        elif used.day != day:
            used.day, used.here, used.elsewhere = day, 0, 0
        tokens = _refilled(used, allowance, now_s)
        if tokens < _WHOLE:
            raise QuotaExceeded("rate", (1.0 - tokens) / (allowance.rate_per_s or 1.0))
        if allowance.daily_quota is not None and used.here + used.elsewhere >= allowance.daily_quota:
            raise QuotaExceeded("daily quota", (day + 1) * DAY_S - now_unix_s)
        used.tokens, used.at_s = tokens - 1.0, now_s
        used.here += 1

    def of_today(self, day: int) -> dict[str, int]:
        """Give, by key, how many calls this process has let through on this day."""
        return {key_id: used.here for key_id, used in self._used.items() if used.day == day}

    def learn(self, key_id: str, day: int, elsewhere: int) -> None:
        """Be told how many calls of the day went through other processes."""
        used = self._used.get(key_id)
        if used is not None and used.day == day:
            used.elsewhere = elsewhere


def _refilled(used: _Used, allowance: Allowance, now_s: float) -> float:
    """Give the tokens in the bucket now; a full one when there is no rate."""
    if allowance.rate_per_s is None:
        return allowance.burst
    return min(allowance.burst, used.tokens + max(0.0, now_s - used.at_s) * allowance.rate_per_s)
