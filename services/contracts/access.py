"""A caller after the key was checked: scopes, priority and limits; and the messages that count a key's calls.

Only values: knows neither keys nor transports, and does not count. Without API keys every caller is `ANYONE`.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

MAX_K = 2_000
"""Maximum number of items in a list."""
DAY_S = 86_400
RATE, QUOTA = "rate", "daily quota"
WHOLE = 1e-9
"""The rounding error of a sum of floats: a token that is less than this short of whole is whole."""


class Scope(StrEnum):
    """A permission of a key."""

    RECOMMEND = "recommend"
    EVENTS = "events"
    ITEMS = "items"
    TEXT = "text"
    ERASE = "erase"
    ADMIN = "admin"


class Priority(IntEnum):
    """The order of service under overload; lower is served first, as in the engine's queue."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


_KEPT_FREE = {Priority.HIGH: 0.0, Priority.NORMAL: 0.25, Priority.LOW: 0.5}


def nearest_class(priority: int) -> Priority:
    return Priority(min(max(priority, Priority.HIGH), Priority.LOW))


def places_for(priority: int, num_places: int) -> int:
    """Return how many of the slots this priority may fill, at least one: the rest is reserved for higher priorities."""
    return max(1, num_places - int(num_places * _KEPT_FREE[nearest_class(priority)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One caller.

    `key_id` names the key in logs and metrics and is not secret; requests for more than `max_k` items are refused.
    `tenant` owns the key; empty is the default tenant (`services.contracts.tenant`). `weight` is the tenant's share
    when capacity is scarce.
    """

    key_id: str
    scopes: frozenset[Scope]
    priority: Priority = Priority.NORMAL
    max_k: int = MAX_K
    tenant: str = ""
    weight: float = 1.0


ANYONE = Caller(key_id="anonymous", scopes=frozenset(Scope))
"""The caller if no keys are configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A key's limits. `burst` calls may arrive at once; None means no limit."""

    rate_per_s: float | None = None
    burst: float = 1.0
    daily_quota: int | None = None

    @property
    def is_limited(self) -> bool:
        return self.rate_per_s is not None or self.daily_quota is not None

    @property
    def max_cost(self) -> int:
        """The maximum cost of one call."""
        burst = int(self.burst + WHOLE)
        if self.daily_quota is None:
            return burst
        return self.daily_quota if self.rate_per_s is None else min(burst, self.daily_quota)

    def shared_by(self, num_processes: int) -> "Allowance":
        """Return each process's part of the limits; a burst stays at least one call, and a quota is rounded up."""
        rate, quota = self.rate_per_s, self.daily_quota
        return Allowance(
            rate_per_s=None if rate is None else rate / num_processes,
            burst=max(1.0, self.burst / num_processes),
            daily_quota=None if quota is None else -(-quota // num_processes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A process's request about one key to the counters that all processes share.

    Attributes:
        cost: Calls to count now, granted or refused as a whole. 0: settle only.
        batch: Further calls to grant ahead, within the room that the key's limits leave for all processes.
        spent: Calls that the process admitted without asking.
        unspent: Granted calls that it returns.
        taken_on: The day (UTC, counted from 1970) on which the unspent calls were granted.
    """

    cost: int
    batch: int = 0
    spent: int = 0
    unspent: int = 0
    taken_on: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The answer: `num_calls` granted, or 0 with reason and waiting time.

    `tokens` is the key's remaining tokens, `today` its calls on `day`.
    """

    num_calls: int
    refused_by: str
    wait_s: float
    tokens: float
    today: int
    day: int
