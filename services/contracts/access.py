"""Who calls, what they may do, and how much they matter: what a door knows of a caller once the key was checked.

Knows neither keys nor transports. Without API keys everybody is `ANYONE`.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from services.contracts.recommend import MAX_K


class Scope(StrEnum):
    """What a key allows."""

    RECOMMEND = "recommend"
    EVENTS = "events"
    TEXT = "text"
    ADMIN = "admin"


class Priority(IntEnum):
    """Who is served first when not all can be; lower goes first, as in the engine's queue."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


_KEPT_FREE = {Priority.HIGH: 0.0, Priority.NORMAL: 0.25, Priority.LOW: 0.5}


def nearest_class(priority: int) -> Priority:
    """Return the class of any priority: outside the classes, the nearest."""
    return Priority(min(max(priority, Priority.HIGH), Priority.LOW))


def places_for(priority: int, num_places: int) -> int:
    """Return how many of so many places this priority may fill, at least one: the others are kept for those before it."""
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
