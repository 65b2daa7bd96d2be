"""Consumes the partitions of one worker, from one incarnation of the topic.

Partitions are assigned by number, not by group membership: worker i of n wants the partitions p with p mod n == i, and
owns the partitions whose lease it gets (services/features/ownership.py). Offsets are still committed under a group's
name. A recreated topic (the embedded broker keeps nothing) has another topic id, which is checked after each fetch, so
that no record is attributed to the former topic. A log that came back shorter ends the consumer; the next consumer
gives it another id (services/stream/continuity.py). Records of a producer's transaction are read once it is committed,
aborted records never. Every failure of the broker is DependencyUnavailable with one remedy: close, and open a new
consumer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
)
from kafka.structs import OffsetAndMetadata

from services.errors import ConfigError, DependencyUnavailable
from services.features.schema import LogPosition
from services.observability.tracing import TraceHeaders
from services.settings.addresses import KafkaAddress
from services.settings.arrivals import ArrivalFile
from services.settings.broker_log import BrokerLog
from services.settings.fetch_pace import FetchPace, FetchWaits
from services.settings.kafka_clients import broker_as_dependency, check_described, close_producer, open_client
from services.settings.kafka_topics import DEAD_LETTERS_KEEP_MS, EVENTS_KEEP_MS, Topic, create_missing
from services.settings.record_batches import UndecodableBatch, step_over_undecodable
from services.stream.decode import DeadLetter, Misplaced, Record

_RETRY_AFTER_S = 1.0
_CONNECT_MS = 2_000
_REQUEST_MS = 5_000
_CLOSE_MS = 500
_FETCH_WAITS = FetchWaits(busy_ms=25, quiet_ms=75, untouched_ms=500)
_TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
_REROUTED = "rerouted_from"
_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
_Sent = TypeVar("_Sent", DeadLetter, Misplaced)


@dataclass(frozen=True, slots=True)
class LogAddress:
    """The topics, their brokers, and the partitions of worker `worker_index` of `num_workers`."""

    kafka: KafkaAddress
    topic: str
    dead_letter_topic: str
    group: str
    num_partitions: int
    worker_index: int = 0
    num_workers: int = 1
    max_poll_records: int = 1_000
    fetch_waits: FetchWaits = _FETCH_WAITS
    arrivals_dir: Path | None = None

    @property
    def topics(self) -> tuple[Topic, ...]:
        """The topics that a worker requires."""
        keep_ms = {self.topic: EVENTS_KEEP_MS, self.dead_letter_topic: DEAD_LETTERS_KEEP_MS}
        return tuple(Topic(name=name, num_partitions=self.num_partitions, keep_ms=ms) for name, ms in keep_ms.items())


class PartitionConsumer:
    """Reads, commits and dead-letters. Used from one thread; close it when any call raises DependencyUnavailable."""

    def __init__(self, address: LogAddress) -> None:
        """Connect and create missing topics; reading starts with `assign`.

        Raises DependencyUnavailable, and ConfigError if the topic's number of partitions differs from the address, by
        which readers look up each user's partition.
        """
        self._address = address
        self._closers: list[Callable[[], None]] = []
        self._log_ids: dict[int, str] = {}
        with self._closing_on_error(), broker_as_dependency():
            self._connect()
            create_missing(self._admin, address.topics)
            self.topic_id, self.num_partitions = self._describe()
            if self.num_partitions != self._address.num_partitions:
                raise ConfigError(
                    f"TAILRACE_TOPIC_PARTITIONS: {self._address.num_partitions}, but topic {self._address.topic} has "
                    f"{self.num_partitions} partitions; set it to {self.num_partitions} for every process"
                )

    @property
    def wanted(self) -> tuple[int, ...]:
        return tuple(range(self._address.worker_index, self.num_partitions, self._address.num_workers))

    @property
    def partitions(self) -> tuple[int, ...]:
        return tuple(self._log_ids)

    def assign(self, partitions: Sequence[int], start: Callable[[int, LogPosition | None], LogPosition]) -> None:
        """Read these partitions from now on, each from `start(partition, committed)` or its oldest record if later.

        The start's topic id applies to all records of its partition. Raises DependencyUnavailable, and the errors of
        `start`.
        """
        starts = {partition: start(partition, self._committed(partition)) for partition in partitions}
        self._log_ids = {partition: first.topic_id for partition, first in starts.items()}
        with broker_as_dependency():
            self._consumer.assign(self._places)
            for topic_partition, begin in self._consumer.beginning_offsets(
                self._places, timeout_ms=_REQUEST_MS
            ).items():
                self._consumer.seek(topic_partition, max(begin, starts[topic_partition.partition].offset))

    def poll(self, wait_ms: int) -> list[Record]:
        """Return the next records, each partition's in order; empty after `wait_ms` without records.

        Raises DependencyUnavailable. A batch that cannot be decoded is one record.
        """
        with broker_as_dependency():
            fetched: Mapping[TopicPartition, Sequence[Any]] = self._pace.poll(wait_ms)
            if fetched or self._pace.is_vain:
                self.check_topic()
        return [
            _record(LogPosition(self._log_ids[topic_partition.partition], topic_partition.partition, raw.offset), raw)
            for topic_partition, batch in fetched.items()
            for raw in batch
        ]

    def check_topic(self) -> None:
        """Raise DependencyUnavailable if the broker does not answer, or the topic was recreated or repartitioned."""
        with broker_as_dependency():
            description = self._describe()
        if description != (self.topic_id, self.num_partitions):
            raise DependencyUnavailable("broker", _RETRY_AFTER_S)

    def lag(self) -> dict[int, int]:
        """Return, by partition, the number of records that `poll` has not returned yet.

        Raises DependencyUnavailable, also if a log came back shorter.
        """
        with broker_as_dependency():
            ends = self._consumer.end_offsets(self._places, timeout_ms=_REQUEST_MS)
            return {
                topic_partition.partition: self._num_behind(topic_partition, end)
                for topic_partition, end in ends.items()
            }

    def commit(self, positions: Mapping[int, LogPosition]) -> None:
        """Commit, by partition, the position after which to resume, with its topic id. Raises DependencyUnavailable."""
        offsets = {
            TopicPartition(self._address.topic, partition): OffsetAndMetadata(last.offset + 1, last.topic_id, -1)
            for partition, last in positions.items()
        }
        if offsets:
            with broker_as_dependency():
                self._consumer.commit(offsets, timeout_ms=_REQUEST_MS)

    def dead_letter(self, letters: Sequence[DeadLetter]) -> None:
        """Copy records to the dead-letter topic, bytes unchanged, reason and position as headers.

        Raises DependencyUnavailable. Only the headers are kept of a record that is too large for that topic: it must
        not block later records.
        """
        with broker_as_dependency():
            self._deliver(self._deliver(letters, self._send), self._send_headers)

    def reroute(self, misplaced: Sequence[Misplaced]) -> list[Misplaced]:
        """Copy records to their users' partitions, with a header that names the original position.

        Raises DependencyUnavailable. Return the records that are too large for the topic, which is possible for records
        that were compressed.
        """
        with broker_as_dependency():
            return self._deliver(misplaced, self._send_on)

    def close(self) -> None:
        """Close the connections; their errors are ignored."""
        for close in self._closers:
            with suppress(KafkaError, OSError, RuntimeError):
                close()
        self._closers.clear()

    def _connect(self) -> None:
        opened = partial(
            open_client,
            address=self._address.kafka,
            bootstrap_timeout_ms=_CONNECT_MS,
            request_timeout_ms=_REQUEST_MS,
            reconnect_backoff_max_ms=500,
        )
        self._admin = opened(KafkaAdminClient)
        self._closers.append(self._admin.close)
        self._consumer = opened(
            KafkaConsumer,
            group_id=self._address.group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_max_wait_ms=self._address.fetch_waits.busy_ms,
            max_poll_records=self._address.max_poll_records,
            allow_auto_create_topics=False,
        )
        step_over_undecodable(self._consumer)
        arrivals = ArrivalFile(self._address.arrivals_dir, self._address.topic).watch()
        self._pace = FetchPace(self._consumer, self._address.fetch_waits, arrivals)
        self._closers.append(self._pace.close)
        self.broker_log = BrokerLog(self._consumer, self._address.topic)
        self._closers.append(partial(self._consumer.close, autocommit=False, timeout_ms=_CLOSE_MS))
        self._producer = opened(KafkaProducer, max_block_ms=1_000, enable_idempotence=False, acks="all")
        self._closers.append(partial(close_producer, self._producer, _CLOSE_MS / 1_000))

    def _num_behind(self, topic_partition: TopicPartition, end: int) -> int:
        """Return the number of records before the end.

        The embedded broker reports its last batch's first record as the end; fetches report the real end.
        """
        fetched, position = self._consumer.highwater(topic_partition), int(self._consumer.position(topic_partition))
        if fetched is not None and max(end, fetched) < position:
            raise DependencyUnavailable("broker", _RETRY_AFTER_S)
        return max(0, max(end, fetched or 0) - position)

    def _committed(self, partition: int) -> LogPosition | None:
        """Return the committed position, if any. A broker may not keep its topic id: rows then skip applied events."""
        topic_partition = TopicPartition(self._address.topic, partition)
        with broker_as_dependency():
            committed = self._consumer.committed(topic_partition, metadata=True, timeout_ms=_REQUEST_MS)
        if committed is None or not committed.metadata:
            return None
        return LogPosition(committed.metadata, partition, int(committed.offset) - 1)

    @property
    def _places(self) -> list[TopicPartition]:
        return [TopicPartition(self._address.topic, partition) for partition in self._log_ids]

    def _describe(self) -> tuple[str, int]:
        (topic,) = self._admin.describe_topics([self._address.topic])
        check_described(topic)
        return str(topic["topic_id"]), len(topic["partitions"])

    def _deliver(self, records: Sequence[_Sent], send: Callable[[_Sent], Any]) -> list[_Sent]:
        """Send each record and wait for its acknowledgement; return records too large for the client or the topic."""
        too_large: list[_Sent] = []
        receipts: list[tuple[_Sent, Any]] = []
        for record in records:
            try:
                receipts.append((record, send(record)))
            except _TOO_LARGE:
                too_large.append(record)
        for record, receipt in receipts:
            try:
                receipt.get(timeout=_REQUEST_MS / 1_000)
            except _TOO_LARGE:
                too_large.append(record)
        return too_large

    def _send_on(self, misplaced: Misplaced) -> Any:
        record = misplaced.record
        position = record.position
        origin = f"{position.topic_id}/{position.partition}/{position.offset}".encode()
        return self._producer.send(
            self._address.topic,
            key=record.key,
            value=record.value,
            headers=[*((name, text.encode()) for name, text in record.trace), (_REROUTED, origin)],
            partition=misplaced.partition,
            timestamp_ms=record.timestamp_ms,
        )

    def _send(self, letter: DeadLetter) -> Any:
        """Pass a record to the producer.

        A record with neither key nor value gets an empty value, since a value is required.
        """
        key, value = letter.record.key, letter.record.value
        value = b"" if key is None and value is None else value
        return self._producer.send(self._address.dead_letter_topic, key=key, value=value, headers=self._headers(letter))

    def _send_headers(self, letter: DeadLetter) -> Any:
        num_bytes = len(letter.record.key or b"") + len(letter.record.value or b"")
        headers = [*self._headers(letter), ("left_out_bytes", str(num_bytes).encode())]
        return self._producer.send(self._address.dead_letter_topic, value=b"", headers=headers)

    def _headers(self, letter: DeadLetter) -> list[tuple[str, bytes]]:
        position = letter.record.position
        headers = {"reason": letter.reason, "topic": self._address.topic, "topic_id": position.topic_id}
        headers |= {"partition": str(position.partition), "offset": str(position.offset)}
        if letter.record.undecodable:
            headers["last_offset"] = str(letter.record.undecodable.last_offset)
        return [(name, text.encode(errors="replace")) for name, text in headers.items()]

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _record(position: LogPosition, raw: Any) -> Record:
    if isinstance(raw, UndecodableBatch):
        return Record(position, None, raw.data, 0, undecodable=raw.why)
    epoch = raw.leader_epoch if raw.leader_epoch >= 0 else None
    if not raw.headers:
        return Record(position, raw.key, raw.value, raw.timestamp, leader_epoch=epoch)
    is_rerouted = any(name == _REROUTED for name, _ in raw.headers)
    headers_bytes = max(0, raw.serialized_header_size)  # -1 if unknown
    return Record(
        position, raw.key, raw.value, raw.timestamp, _trace(raw.headers), is_rerouted, headers_bytes, leader_epoch=epoch
    )


def _trace(headers: Sequence[tuple[str, bytes]]) -> TraceHeaders:
    """Return the W3C trace context of a record's headers, which are untrusted."""
    return tuple((name, text.decode("ascii", "replace")) for name, text in headers if name in _TRACE_HEADERS and text)
