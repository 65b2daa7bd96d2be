"""A caller as a door sees it after the key was checked: scopes, priority and limits.

Knows neither keys nor transports. Without API keys every caller is `ANYONE`.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from services.contracts.recommend import MAX_K


class Scope(StrEnum):
    """A permission of a key."""

    RECOMMEND = "recommend"
    EVENTS = "events"
    TEXT = "text"
    ADMIN = "admin"


class Priority(IntEnum):
    """The order of service under overload; lower goes first, as in the engine's queue."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


_KEPT_FREE = {Priority.HIGH: 0.0, Priority.NORMAL: 0.25, Priority.LOW: 0.5}


def nearest_class(priority: int) -> Priority:
    """Return the class nearest to any priority."""
    return Priority(min(max(priority, Priority.HIGH), Priority.LOW))


def places_for(priority: int, num_places: int) -> int:
    """Return how many of the places this priority may fill, at least one: the others are kept for higher priorities."""
    return max(1, num_places - int(num_places * _KEPT_FREE[nearest_class(priority)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One caller. `key_id` names the key in logs and metrics and is no secret; requests for more than `max_k` items are refused."""

    key_id: str
    scopes: frozenset[Scope]
    priority: Priority = Priority.NORMAL
    max_k: int = MAX_K


ANYONE = Caller(key_id="anonymous", scopes=frozenset(Scope))
"""The caller where no keys are set up."""
