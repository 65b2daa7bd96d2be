"""Records events: checks each, then sends them to the broker, all or none.

Knows neither JSON nor protobuf. Missing event ids and times are set here; a caller that may retry should send its own
event ids, which make a repeat harmless.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from services.contracts.events import EventBody, EventsBody, Interaction
from services.contracts.message import convert
from services.contracts.tenant import DEFAULT_TENANT, scoped
from services.errors import InvalidRequest
from services.gateway.overload.long_work import LongWork

_FEW = 64
"""Up to this many events are checked in the event loop."""


class EventLog(Protocol):
    """A durable log of events."""

    async def record(self, records: Sequence[tuple[bytes, bytes | None]]) -> object:
        """Return once all records (key, value; a None value marks a tombstone) are acknowledged.

        Raises DependencyUnavailable or Overloaded.
        """
        ...


class RecordEvents:
    """Checks and records events."""

    def __init__(self, log: EventLog, max_events: int, wall_clock: Callable[[], float] = time.time) -> None:
        self.max_events = max_events
        self._log = log
        self._wall_clock = wall_clock
        self._checking = LongWork("events")

    async def __call__(self, drafts: Sequence[EventBody], tenant: str) -> tuple[Interaction, ...]:
        """Record events of a tenant's users, each id of a user once, and return all in the same order.

        Raises InvalidRequest naming the event and the field before anything is sent; DependencyUnavailable or
        Overloaded if the broker has not acknowledged all of them.
        """
        now_ms = int(self._wall_clock() * 1_000)
        events, records = await self._checking.run_if(len(drafts) > _FEW, self._checked, drafts, now_ms, tenant)
        await self._log.record(records)
        return events

    def _checked(
        self, drafts: Sequence[EventBody], now_ms: int, tenant: str
    ) -> tuple[tuple[Interaction, ...], list[tuple[bytes, bytes | None]]]:
        events = check_events(drafts, self.max_events, now_ms, tenant)
        in_order = sorted(once_each(events), key=lambda event: event.event_time_ms)  # a history is in arrival order
        return events, [(event.key, event.encode()) for event in in_order]


def read_events(drafts: Sequence[Any], max_events: int) -> tuple[EventBody, ...]:
    """Return plain values as events. Their number is checked first: a body has room for half a million empty events.

    Raises InvalidRequest with the event's index in the field: `events[3].item_id`.
    """
    check_num_events(len(drafts), max_events)
    return convert(EventsBody, {"events": drafts}).events


def check_events(
    events: Sequence[EventBody], max_events: int, now_ms: int, tenant: str = DEFAULT_TENANT
) -> tuple[Interaction, ...]:
    """Return the events as interactions of the tenant's users that are accepted now.

    Raises InvalidRequest with the event's index in the field.
    """
    check_num_events(len(events), max_events)
    return tuple(_accepted(index, event, now_ms, tenant) for index, event in enumerate(events))


def once_each(events: Iterable[Interaction]) -> list[Interaction]:
    """Return the first event of each id of a user: repeats within a request are dropped as across requests."""
    first: dict[tuple[str, str], Interaction] = {}
    for event in events:
        first.setdefault((event.user_id, event.event_id), event)
    return [*first.values()]


def check_num_events(num_events: int, max_events: int) -> None:
    """Reject a request with no events or too many. Raises InvalidRequest."""
    if not num_events:
        raise InvalidRequest("events", "empty", "send at least one event")
    if num_events > max_events:
        raise InvalidRequest("events", f"{num_events} entries", f"send at most {max_events} per request")


def _accepted(index: int, sent: EventBody, now_ms: int, tenant: str) -> Interaction:
    fields = msgspec.structs.asdict(sent)
    fields["user_id"] = scoped(tenant, sent.user_id)
    fields["event_id"] = sent.event_id or uuid.uuid4().hex
    fields["event_time_ms"] = now_ms if sent.event_time_ms is None else sent.event_time_ms
    event = Interaction(**fields, accepted_time_ms=now_ms)
    try:
        event.check_time(now_ms)
    except InvalidRequest as error:
        raise InvalidRequest(f"events[{index}].{error.field}", error.problem, error.fix) from error
    return event
