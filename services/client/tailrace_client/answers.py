"""What the calls take and give: the same over both doors."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """One recommended item. Scores compare within one answer only; `source` is the tier that chose the item."""

    item_id: str
    score: float
    title: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Items, best first, and how they were made; fewer than k when the filters leave fewer.

    Send `request_id` with the events that follow from this answer. `newest_event_time_ms` (Unix milliseconds) is the newest
    event of this user that the answer is based on. `deadline_ms` is the server's, for the last attempt.
    """

    request_id: str
    items: tuple[Item, ...]
    tier: str
    reason: str
    bundle_version: str
    deadline_ms: int
    stages_ms: Mapping[str, float]
    newest_event_time_ms: int | None = None
    feature_age_ms: int | None = None
    rationale: str | None = None
    rationale_reason: str | None = None
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a user did with an item; `request_id` names the recommendation that it follows from.

    The id is made here, so that the same event sent again, by this client or by you, has its effect once. Without a time the
    server sets that of its arrival.
    """

    user_id: str
    item_id: str
    event_type: str = "click"
    request_id: str | None = None
    event_time_ms: int | None = None
    value: float = 1.0
    event_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The ids of the recorded events, in the order sent: the broker has every one of them."""

    event_ids: tuple[str, ...]
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a recent request was answered: in words, and `fields` with all that the server keeps of it."""

    request_id: str
    outcome: str
    sentences: tuple[str, ...]
    fields: Mapping[str, Any]
    num_attempts: int = 1


_READ = frozenset(Recommendation.__slots__) - {"items", "num_attempts"}


def recommendation_from(fields: Mapping[str, Any], items: Iterable[Item], num_attempts: int) -> Recommendation:
    """Return an answer from its fields; those that a newer server adds are left out."""
    known = {name: value for name, value in fields.items() if name in _READ}
    return Recommendation(items=tuple(items), num_attempts=num_attempts, **known)
