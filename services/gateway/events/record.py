"""Records events: checks each, then sends them to the broker, all or none.

Knows neither JSON nor protobuf: a draft is a mapping of the fields that the caller sent. Event ids and times that are
absent are set here; a caller who may retry should send its own event ids, since only those make a repeat harmless.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from services.contracts.events import SENT_FIELDS, Interaction, interaction_from, refuse_unknown
from services.errors import InvalidRequest

Draft = Mapping[str, Any]
"""One event's fields, as parsed and not yet checked."""

_MAY_BE_NULL = frozenset({"event_id", "event_time_ms", "request_id"})
"""In the REST door's schema; null there means absent."""


class EventLog(Protocol):
    """A durable log of events."""

    async def record(self, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Return once all records (key, value; None: a tombstone) are acknowledged. Raises DependencyUnavailable or Overloaded."""
        ...


class RecordEvents:
    """Checks and records events."""

    def __init__(self, log: EventLog, max_events: int, wall_clock: Callable[[], float] = time.time) -> None:
        self.max_events = max_events
        self._log = log
        self._wall_clock = wall_clock

    async def __call__(self, drafts: Sequence[Draft]) -> tuple[str, ...]:
        """Record the events and return their ids in the same order.

        Raises InvalidRequest naming the event and the field before anything is sent; DependencyUnavailable or Overloaded when
        the broker has not acknowledged all of them.
        """
        events = check_events(drafts, self.max_events, now_ms=int(self._wall_clock() * 1_000))
        in_order = sorted(events, key=lambda event: event.event_time_ms)  # a history is in the order of arrival
        await self._log.record([(event.key, event.encode()) for event in in_order])
        return tuple(event.event_id for event in events)


def check_events(drafts: Sequence[Draft], max_events: int, now_ms: int) -> tuple[Interaction, ...]:
    """Return the drafts as interactions. Raises InvalidRequest, its field prefixed by the event's place: `events[3].item_id`."""
    check_num_events(len(drafts), max_events)
    events = tuple(_checked(place, draft, now_ms) for place, draft in enumerate(drafts))
    _refuse_duplicates(events)
    return events


def check_num_events(num_events: int, max_events: int) -> None:
    """Refuse a request without events, or with too many. Raises InvalidRequest."""
    if not num_events:
        raise InvalidRequest("events", "empty", "send at least one event")
    if num_events > max_events:
        raise InvalidRequest("events", f"{num_events} entries", f"send at most {max_events} per request")


def _checked(place: int, draft: Draft, now_ms: int) -> Interaction:
    try:
        refuse_unknown(draft, SENT_FIELDS)
        made = {"event_id": uuid.uuid4().hex, "event_time_ms": now_ms}
        sent = {name: value for name, value in draft.items() if value is not None or name not in _MAY_BE_NULL}
        event = interaction_from({**made, **sent, "accepted_time_ms": now_ms})
        event.check_time(now_ms)
    except InvalidRequest as error:
        raise InvalidRequest(f"events[{place}].{error.field}", error.problem, error.fix) from error
    return event


def _refuse_duplicates(events: Sequence[Interaction]) -> None:
    first: dict[str, int] = {}
    for place, event in enumerate(events):
        earlier = first.setdefault(event.event_id, place)
        if earlier != place:
            raise InvalidRequest(
                f"events[{place}].event_id", f"the same as events[{earlier}]'s", "send each event once"
            )
