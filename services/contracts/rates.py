"""A key's limits, and what a process and the shared counts tell each other about it. Values alone: who counts, and how, is elsewhere."""

from dataclasses import dataclass

DAY_S = 86_400
RATE, QUOTA = "rate", "daily quota"
WHOLE = 1e-9
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
        burst = int(self.burst + WHOLE)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a process tells the shared counts about a key, and what it asks of them.

    Attributes:
        cost: Calls to count now; refused as a whole. 0: none, this only settles.
        batch: Further calls to grant ahead, as far as the key's limits have room for all processes.
        spent: Calls that the process let through without asking.
        unspent: Granted calls that it gives back.
        taken_on: The day (UTC, counted from 1970) on which those were granted.
    """

    cost: int
    batch: int = 0
    spent: int = 0
    unspent: int = 0
    taken_on: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The answer: `num_calls` granted, or 0, why not, and for how long; then what the key has left, and the day."""

    num_calls: int
    refused_by: str
    wait_s: float
    tokens: float
    today: int
    day: int
