"""Splits records into interactions and dead letters with a reason. Pure.

A record that can never be applied must not stop the log: unreadable bytes, unknown fields, a key that is not the user id (then
another worker might own that user), and times that no row could carry.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.contracts.events import MAX_EVENT_LEAD_MS, Interaction, decode_interaction
from services.errors import InvalidRequest
from services.features.schema import LogPosition
from services.observability.tracing import TraceHeaders
from services.stream.aggregate import LoggedEvent

_LAST_TIME_MS = 4_102_444_800_000
"""2100-01-01: beyond any clock that is merely wrong by some days."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record as the broker delivered it. `timestamp_ms` is the producer's or the broker's, by the topic's setting.

    `trace` is the sender's W3C trace context, empty when there is none.
    """

    position: LogPosition
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    trace: TraceHeaders = ()


@dataclass(frozen=True, slots=True)
class LoggedInteraction:
    """One interaction and its place in the log."""

    interaction: Interaction
    position: LogPosition

    @property
    def event(self) -> LoggedEvent:
        """The part that the aggregates need."""
        it = self.interaction
        return LoggedEvent(it.user_id, it.item_id, it.event_id, it.event_time_ms * 1_000, self.position)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that cannot be applied, and why."""

    record: Record
    reason: str


def decode(records: Iterable[Record]) -> tuple[list[LoggedInteraction], list[DeadLetter]]:
    """Split records into interactions and dead letters, both in the order given."""
    good: list[LoggedInteraction] = []
    dead: list[DeadLetter] = []
    for record in records:
        try:
            good.append(LoggedInteraction(_interaction(record), record.position))
        except InvalidRequest as error:
            dead.append(DeadLetter(record, str(error)[:500]))
    return good, dead


def _interaction(record: Record) -> Interaction:
    interaction = decode_interaction(record.value)
    if record.key != interaction.key:
        raise InvalidRequest("key", "not the user id", "produce with the user id as the record's key")
    latest_ms = min(record.timestamp_ms + MAX_EVENT_LEAD_MS, _LAST_TIME_MS)
    if interaction.event_time_ms > latest_ms:
        raise InvalidRequest("event_time_ms", "later than the record itself", "send Unix time in milliseconds")
    return interaction
