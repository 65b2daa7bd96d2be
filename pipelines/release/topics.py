"""Reads the topics of impressions and interactions from a time on, each call up to their current end.

Uses no consumer group.

A topic that was recreated (the embedded broker keeps nothing on disk), or whose log became shorter, is read from the
start again; repeated records count once. Unreadable records are counted and skipped.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kafka import TopicPartition
from kafka.errors import OffsetOutOfRangeError

from pipelines.experiments.join import SKEW_MS
from services.contracts.erasure import decode_record
from services.contracts.events import Impression, Interaction, decode_impression
from services.errors import DependencyUnavailable, InvalidRequest
from services.settings.addresses import KafkaAddress
from services.settings.kafka_clients import REQUEST_MS, broker_as_dependency, open_reader
from services.settings.record_batches import UndecodableBatch
from services.settings.topic_reader import TopicReader as LogReader

_POLL_MS = 500
_MAX_RECORDS = 2_000
_BEYOND_S = 1.0
"""How long reading continues at the end: the embedded broker reports its last batch's first record as the end."""
Batch = tuple[list[Impression], list[Interaction]]


class ReleaseTopicReader:
    """Owns a consumer, opened lazily. Used from one thread; `close` it in the end."""

    def __init__(
        self,
        kafka: KafkaAddress,
        impressions: str,
        interactions: str,
        since_ms: int,
        on_refused: Callable[[str, int], object] = lambda _topic, _number: None,
    ) -> None:
        """Keep the parts without connecting.

        Args:
            kafka: The brokers.
            impressions: Name of the topic of impressions.
            interactions: Name of the topic of users' events.
            since_ms: Start time of relevant records (Unix ms).
            on_refused: Called with a topic and its number of unreadable records.
        """
        self._kafka = kafka
        self._decoders: Mapping[str, Callable[[bytes | None], Any]] = {
            impressions: decode_impression,
            interactions: decode_record,
        }
        self._impressions = impressions
        self._since_ms = since_ms - SKEW_MS
        self._on_refused = on_refused
        self._clients = ExitStack()
        self._consumer: Any = None
        self._logs: LogReader | None = None

    def read(self) -> Iterator[Batch]:
        """Yield new records up to the topics' current end. Raises DependencyUnavailable.

        It may then be called again.
        """
        try:
            with broker_as_dependency():
                yield from self._read()
        except DependencyUnavailable as error:
            if isinstance(error.__cause__, OffsetOutOfRangeError):
                self._logs = None
            self.close()
            raise

    def close(self) -> None:
        """Close the connections; the next `read` continues at the same offsets."""
        self._clients.close()
        self._clients, self._consumer = ExitStack(), None

    def _read(self) -> Iterator[Batch]:
        logs = self._connected()
        ends = self._consumer.end_offsets(logs.places, timeout_ms=REQUEST_MS)
        reached_s: float | None = None
        while reached_s is None or time.monotonic() - reached_s < _BEYOND_S:
            fetched = logs.poll(_POLL_MS)
            yield self._decode(fetched)
            if reached_s is None and all(logs.marks[partition].offset >= end for partition, end in ends.items()):
                reached_s = time.monotonic()
            if reached_s is not None and not fetched:
                return

    def _connected(self) -> LogReader:
        """Return a consumer of all partitions, each at its last offset, or else at the start time."""
        before = self._logs
        if self._consumer is None or before is None or not before.is_same():
            self.close()
            admin, self._consumer = open_reader(
                self._kafka, self._clients, fetch_max_wait_ms=_POLL_MS // 2, max_poll_records=_MAX_RECORDS
            )
            logs = LogReader(admin, self._consumer, list(self._decoders), self._starts)
            logs.resume(before.topic_ids if before else {}, before.marks if before else {})
            self._logs = before = logs
        return before

    def _starts(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset of the first record since the start time: the end without such a record.

        The embedded broker finds times only within its last batches; earlier times mean the beginning.
        """
        beginnings = self._consumer.beginning_offsets(list(places), timeout_ms=REQUEST_MS)
        first_records = self._consumer.offsets_for_times(dict.fromkeys(places, self._since_ms), timeout_ms=REQUEST_MS)
        ends = self._consumer.end_offsets(list(places), timeout_ms=REQUEST_MS)
        starts = {}
        for partition in places:
            if (first := first_records[partition]) is None:
                starts[partition] = ends[partition]
            else:
                starts[partition] = max(beginnings[partition], first.offset if first.timestamp >= 0 else 0)
        return starts

    def _decode(self, fetched: Mapping[TopicPartition, Sequence[Any]]) -> Batch:
        impressions: list[Impression] = []
        interactions: list[Interaction] = []
        for partition, records in fetched.items():
            decode, num_refused = self._decoders[partition.topic], 0
            into: list[Any] = impressions if partition.topic == self._impressions else interactions
            for record in records:
                message = _readable(record, decode)
                num_refused += message is None
                if isinstance(message, Impression | Interaction):  # otherwise an erasure
                    into.append(message)
            if num_refused:
                self._on_refused(partition.topic, num_refused)
        return impressions, interactions


def _readable(record: Any, decode: Callable[[bytes | None], Any]) -> Any:
    """Return a record's content; None if it, or its whole batch, is unreadable."""
    if isinstance(record, UndecodableBatch):
        return None
    try:
        return decode(record.value)
    except InvalidRequest:
        return None
