"""The calls, before a door writes them: their fields carry the server's names, the same in JSON and in messages."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar
from urllib.parse import quote

from tailrace_client.answers import Event, Explanation, Recommendation, Recorded

A = TypeVar("A", Recommendation, Recorded, Explanation)


class RecommendOptions(TypedDict, total=False):
    """What a recommendation may be told besides the user.

    Attributes:
        k: How many items; 10 if absent.
        recent_item_ids: Items that the store cannot know yet, oldest first; required without a user.
        exclude_item_ids: Items never to show.
        exclude_seen: Whether to leave out what the user has seen; if absent, unless the live bundle learned that users come back to items.
        categories: Only items of any of these.
        allowed_item_ids: Only these items.
        rationale: Whether to add a sentence on why these items, if it can be written before the deadline.
        request_id: The request's id; one is made if absent.
    """

    k: int
    recent_item_ids: Sequence[str]
    exclude_item_ids: Sequence[str]
    exclude_seen: bool
    categories: Sequence[str]
    allowed_item_ids: Sequence[str]
    rationale: bool
    request_id: str


@dataclass(frozen=True, slots=True)
class Call(Generic[A]):
    """One call: its answer's type, its REST operation, its gRPC method if there is one, and its fields."""

    answer: type[A]
    verb: str
    path: str
    method: str | None
    fields: dict[str, Any]
    request_id: str | None = None

    def with_deadline(self, deadline_ms: int) -> dict[str, Any]:
        """Return the fields of one attempt; only recommendations take a deadline."""
        return {**self.fields, "deadline_ms": deadline_ms} if self.answer is Recommendation else self.fields


def recommend_call(user_id: str | None, options: RecommendOptions) -> Call[Recommendation]:
    """Build the call. Raises TypeError for an option that does not exist."""
    if unknown := options.keys() - RecommendOptions.__annotations__.keys():
        raise TypeError(f"recommend has no option {', '.join(sorted(unknown))}")
    request_id = options.get("request_id") or uuid.uuid4().hex
    fields = {name: list(value) if isinstance(value, (tuple, set)) else value for name, value in options.items()}
    filters = {name: fields.pop(name) for name in ("categories", "allowed_item_ids") if name in fields}
    fields |= {"request_id": request_id}
    fields |= {"filters": filters} if filters else {}
    fields |= {} if user_id is None else {"user_id": user_id}
    return Call(Recommendation, "POST", "/v1/recommendations", "Recommend", fields, request_id)


def record_call(events: Event | Iterable[Event]) -> Call[Recorded]:
    """Build the call."""
    listed = [events] if isinstance(events, Event) else list(events)
    return Call(Recorded, "POST", "/v1/events", "RecordEvents", {"events": [_event_fields(one) for one in listed]})


def explain_call(request_id: str) -> Call[Explanation]:
    """Build the call; the gRPC door has none."""
    return Call(Explanation, "GET", f"/v1/explanations/{quote(request_id, safe='')}", None, {})


def _event_fields(event: Event) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in Event.__slots__}
    return {name: value for name, value in fields.items() if value is not None}
