"""Splits records into interactions, erasures, misplaced records, and dead letters with a reason. Pure.

A record that can never be applied must not stop the log: batches that cannot be decoded, unreadable bytes, unknown
fields, a key that is not the user id, and times outside a row's range. A misplaced record is on a partition that is not
its user's: another process owns that user's row. Producers on librdkafka misplace records unless configured to
partition like Kafka's own client (`partitioner=murmur2_random`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from services.contracts.erasure import Erasure, decode_record
from services.contracts.events import (
    MAX_EVENT_AGE_MS,
    MAX_EVENT_LEAD_MS,
    Impression,
    Interaction,
    decode_impression,
)
from services.errors import InvalidRequest
from services.features.ownership import partition_of
from services.features.schema import LogPosition
from services.observability.tracing import TraceHeaders
from services.settings.record_batches import Undecodable
from services.stream.aggregate import LoggedEvent

MAX_CLOCK_LEAD_MS = 3_600_000
"""Maximum lead of a producer's clock over the worker's: more than clock drift, less than a wrong time zone."""
MAX_VALUE_BYTES = 65_536
"""Four times the size of an event whose ids have the maximum length in JSON's longest encoding."""
MAX_HEADERS_BYTES = 65_536
"""Names and values of a record's headers together."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record as the broker delivered it. `timestamp_ms` is the producer's or the broker's, by the topic's setting.

    `trace` is the sender's W3C trace context, empty if absent.
    """

    position: LogPosition
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    trace: TraceHeaders = ()
    is_rerouted: bool = False
    """Whether a worker sent it to this partition from a wrong partition."""
    headers_bytes: int = 0
    undecodable: Undecodable | None = None
    """Set for an undecodable batch of records, or the rest of a batch: `value` is the whole batch's bytes."""
    leader_epoch: int | None = None
    """The partition's leader epoch when it was written; None if unknown."""

    @property
    def last_position(self) -> LogPosition:
        """The position after which reading resumes."""
        return replace(self.position, offset=self.undecodable.last_offset) if self.undecodable else self.position


@dataclass(frozen=True, slots=True)
class LoggedInteraction:
    """One interaction and its position in the log."""

    interaction: Interaction
    position: LogPosition
    leader_epoch: int | None = field(default=None, compare=False)
    """The record's timestamp; the offline log does not keep it."""

    @property
    def event(self) -> LoggedEvent:
        """The part that the aggregates need."""
        it = self.interaction
        time_us = it.event_time_ms * 1_000
        return LoggedEvent(it.user_id, it.item_id, it.event_id, time_us, self.position, it.event_type, it.value)


@dataclass(frozen=True, slots=True)
class LoggedImpression:
    """One impression and its position in the log of impressions."""

    impression: Impression
    position: LogPosition
    leader_epoch: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class LoggedErasure:
    """The erasure of a user and its position in the log."""

    erasure: Erasure
    position: LogPosition
    leader_epoch: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that cannot be applied, and why."""

    record: Record
    reason: str


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A readable record on a wrong partition, and its user's partition."""

    record: Record
    partition: int

    @property
    def too_large(self) -> DeadLetter:
        return DeadLetter(self.record, f"value: too large to forward to the user's partition {self.partition}")


@dataclass(frozen=True, slots=True)
class Decoded:
    """A batch of records by the action that they need, each in the given order."""

    events: list[LoggedInteraction]
    misplaced: list[Misplaced]
    dead: list[DeadLetter]
    erasures: list[LoggedErasure] = field(default_factory=list)


def decode(records: Iterable[Record], num_partitions: int, now_ms: int) -> Decoded:
    """Split the records of a topic with this many partitions; `now_ms` is the worker's Unix ms.

    A record misplaced twice is a dead letter.
    """
    decoded = Decoded([], [], [])
    partition_of_user = cache(lambda user_id: partition_of(user_id, num_partitions))
    for record in records:
        if record.undecodable is not None:
            decoded.dead.append(
                DeadLetter(record, record.undecodable.reason(record.position.partition, record.position.offset))
            )
            continue
        try:
            parsed = _parse(record, now_ms)
            partition = partition_of_user(parsed.user_id)
            _check_forwarded(record, partition)
        except InvalidRequest as error:
            decoded.dead.append(DeadLetter(record, str(error)[:500]))
        else:
            if partition != record.position.partition:
                decoded.misplaced.append(Misplaced(record, partition))
            elif isinstance(parsed, Erasure):
                decoded.erasures.append(LoggedErasure(parsed, record.position, record.leader_epoch))
            else:
                decoded.events.append(LoggedInteraction(parsed, record.position, record.leader_epoch))
    return decoded


def _check_forwarded(record: Record, partition: int) -> None:
    """Reject a record that was sent on and is not on its user's partition. Raises InvalidRequest."""
    if record.is_rerouted and partition != record.position.partition:
        problem = f"{record.position.partition} is not the user's, although a worker forwarded the record there"
        raise InvalidRequest("partition", problem, "after the topic gained partitions, produce the record again")


def _parse(record: Record, now_ms: int) -> Interaction | Erasure:
    _check_size("value", len(record.value or b""), MAX_VALUE_BYTES)
    _check_size("headers", record.headers_bytes, MAX_HEADERS_BYTES)
    interaction = decode_record(record.value)
    if record.key != interaction.key:
        raise InvalidRequest("key", "not the user id", "produce with the user id as the record's key")
    if isinstance(interaction, Erasure):
        _check_clock("accepted_time_ms", interaction.accepted_time_ms, now_ms)
        if interaction.accepted_time_ms < record.timestamp_ms - MAX_EVENT_AGE_MS:  # it would erase next to nothing
            raise InvalidRequest(
                "accepted_time_ms", "30 days older than the record itself", "send the time of the request to erase"
            )
        return interaction
    interaction.check_unit()
    if interaction.event_time_ms > record.timestamp_ms + MAX_EVENT_LEAD_MS:
        raise InvalidRequest("event_time_ms", "later than the record itself", "send Unix time in milliseconds")
    for name in ("event_time_ms", "accepted_time_ms"):
        _check_clock(name, getattr(interaction, name) or 0, now_ms)
    return interaction


def read_impression(record: Record, now_ms: int) -> LoggedImpression:
    """Read one record of the topic of impressions; `now_ms` is the worker's Unix ms. Raises InvalidRequest."""
    impression = decode_impression(record.value)
    _check_clock("shown_time_ms", impression.shown_time_ms, now_ms)
    return LoggedImpression(impression, record.position, record.leader_epoch)


def _check_clock(name: str, time_ms: int, now_ms: int) -> None:
    """Reject a time far ahead of the worker's clock. Raises InvalidRequest."""
    if time_ms > now_ms + MAX_CLOCK_LEAD_MS:
        raise InvalidRequest(name, "more than an hour ahead of the worker's clock", "set the producer's clock")


def _check_size(field: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise InvalidRequest(field, f"{num_bytes} bytes", f"send at most {limit}")
