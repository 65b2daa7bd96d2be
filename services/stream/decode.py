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

MAX_CLOCK_LEAD_MS = 3_600_000
"""How far a producer's clock may be ahead of the worker's: more than clocks drift apart, less than a wrong time zone."""


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


def decode(records: Iterable[Record], now_ms: int) -> tuple[list[LoggedInteraction], list[DeadLetter]]:
    """Split records into interactions and dead letters, both in the order given. `now_ms` is the worker's Unix ms."""
    good: list[LoggedInteraction] = []
    dead: list[DeadLetter] = []
    for record in records:
        try:
            good.append(LoggedInteraction(_interaction(record, now_ms), record.position))
        except InvalidRequest as error:
            dead.append(DeadLetter(record, str(error)[:500]))
    return good, dead


def _interaction(record: Record, now_ms: int) -> Interaction:
    interaction = decode_interaction(record.value)
    if record.key != interaction.key:
        raise InvalidRequest("key", "not the user id", "produce with the user id as the record's key")
    if interaction.event_time_ms > record.timestamp_ms + MAX_EVENT_LEAD_MS:
        raise InvalidRequest("event_time_ms", "later than the record itself", "send Unix time in milliseconds")
    if interaction.event_time_ms > now_ms + MAX_CLOCK_LEAD_MS:
        raise InvalidRequest(
            "event_time_ms", "more than an hour ahead of the worker's clock", "set the producer's clock"
        )
    return interaction
