"""Reads whole topics without a consumer group, and resumes each partition if its log is still the log that was read.

A log may come back shorter under the same topic id and grow again: its offsets then name other records, which a reader
would skip. So a `Mark` has the leader epoch and a digest of the last record besides the offset. They are compared
before reading, and again when a fetch brings records of another leader (KIP-320). A partition that differs is read
again from its beginning: the reader's caller must tolerate that. Compaction may have removed the last record: then
leader epochs decide, and without leader epochs the partition is read again too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import structlog
from kafka import TopicPartition

from services.settings.broker_log import BrokerLog
from services.settings.kafka_clients import REQUEST_MS, check_described
from services.settings.record_batches import UndecodableBatch

_log = structlog.get_logger()
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a partition was read: next offset, and the last record's leader epoch, offset and digest, if known."""

    offset: int
    leader_epoch: int | None = None
    last: tuple[int, str] | None = None


def mark_from(plain: Mapping[str, Any]) -> Mark:
    """Return a mark from the plain form of `dataclasses.asdict`.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    last, epoch = plain["last"], plain["leader_epoch"]
    return Mark(
        offset=int(plain["offset"]),
        leader_epoch=None if epoch is None else int(epoch),
        last=None if last is None else (int(last[0]), str(last[1])),
    )


class TopicReader:
    """Reads partitions through a connected consumer.

    Used from one thread; raises the client's errors and DependencyUnavailable.
    """

    def __init__(
        self,
        admin: Any,
        consumer: Any,
        names: Sequence[str],
        begin: Callable[[Sequence[TopicPartition]], Mapping[TopicPartition, int]] | None = None,
        logs: Callable[[str], BrokerLog] | None = None,
    ) -> None:
        """Take the clients and the topics.

        `begin` returns the start of partitions without a mark: by default the log's beginning.
        """
        self._admin = admin
        self._consumer = consumer
        self._names = list(names)
        self._begin = begin or self._beginnings
        self._logs = {name: logs(name) if logs else BrokerLog(consumer, name) for name in names}
        self.topic_ids: Mapping[str, str] = {}
        self.places: list[TopicPartition] = []
        self.marks: dict[TopicPartition, Mark] = {}
        self.num_begun_again = 0
        """Partitions whose log turned out to differ from the log that was read."""

    def resume(self, topic_ids: Mapping[str, str], marks: Mapping[TopicPartition, Mark]) -> None:
        """Resume after these marks, of topics with these ids; without a mark or in another log, at the beginning."""
        self.topic_ids, self.places = self._describe()
        self._consumer.assign(self.places)
        same = {
            partition: mark
            for partition, mark in marks.items()
            if topic_ids.get(partition.topic) == self.topic_ids[partition.topic]
        }
        self._go_on(
            {
                partition: same[partition]
                for partition in self.places
                if partition in same and self._is_intact(partition, same[partition])
            }
        )

    def is_same(self) -> bool:
        """Return whether the topics still exist with the same ids and partitions."""
        return (self.topic_ids, self.places) == self._describe()

    def poll(
        self, timeout_ms: int, poll: Callable[[int], Mapping[TopicPartition, list[Any]]] | None = None
    ) -> Mapping[TopicPartition, Sequence[Any]]:
        """Return the next records, without records of a log that differs: it is read again from its beginning.

        `poll` replaces the consumer's own.
        """
        fetched = (poll or self._consumer.poll)(timeout_ms)
        doubtful = [partition for partition, records in fetched.items() if self._has_new_leader(partition, records)]
        if changed := {partition for partition in doubtful if not self._is_intact(partition, self.marks[partition])}:
            self._go_on({partition: mark for partition, mark in self.marks.items() if partition not in changed})
            return {}
        if doubtful:  # the comparison has moved the consumer
            self._go_on(self.marks)
            for partition, records in fetched.items():
                self._consumer.seek(partition, _end(records[-1]))
        for partition in self.places:
            self.marks[partition] = self._mark(partition, fetched.get(partition, ()))
        return fetched

    def _mark(self, partition: TopicPartition, records: Sequence[Any]) -> Mark:
        before, offset = self.marks[partition], int(self._consumer.position(partition))
        if not records:  # only control records or compacted records
            return Mark(offset, before.leader_epoch, before.last)
        epoch = _epoch(records[-1])
        return Mark(
            offset, before.leader_epoch if epoch is None else epoch, (int(records[-1].offset), digest_of(records[-1]))
        )

    def _has_new_leader(self, partition: TopicPartition, records: Sequence[Any]) -> bool:
        before = self.marks[partition].leader_epoch
        return before is not None and any(epoch not in (None, before) for epoch in map(_epoch, records))

    def _is_intact(self, partition: TopicPartition, mark: Mark) -> bool:
        """Return whether the log up to a mark is the log that was read."""
        logs = self._logs[partition.topic]
        if not mark.offset:
            return True
        self._consumer.assign(self.places)
        is_intact = logs.intact_until(partition.partition, mark.offset, mark.leader_epoch) == mark.offset
        if is_intact:
            by_epoch = mark.leader_epoch is not None and logs.knows_epochs
            is_intact = by_epoch if mark.last is None else self._has_last(partition, mark.last, by_epoch)
        if not is_intact:
            self.num_begun_again += 1
            _log.warning(
                "topic.log_changed", topic=partition.topic, partition=partition.partition, read_until=mark.offset
            )
        return is_intact

    def _has_last(self, partition: TopicPartition, last: tuple[int, str], by_epoch: bool) -> bool:
        """Return whether the last read record is still there; if compaction has removed it, return `by_epoch`."""
        record = self._logs[partition.topic].record_at(partition.partition, last[0])
        return digest_of(record) == last[1] if int(record.offset) == last[0] else by_epoch

    def _go_on(self, marks: Mapping[TopicPartition, Mark]) -> None:
        new = [partition for partition in self.places if partition not in marks]
        self._consumer.assign(self.places)  # it knows only the leaders of assigned partitions
        begin = self._beginnings(self.places)
        starts = self._begin(new) if new else {}
        self.marks = {
            partition: marks[partition] if partition in marks else Mark(starts[partition]) for partition in self.places
        }
        for partition, mark in self.marks.items():
            self._consumer.seek(partition, max(begin[partition], mark.offset))

    def _beginnings(self, places: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        offsets: Mapping[TopicPartition, int] = self._consumer.beginning_offsets(list(places), timeout_ms=REQUEST_MS)
        return offsets

    def _describe(self) -> tuple[dict[str, str], list[TopicPartition]]:
        topic_ids, places = {}, []
        for topic in self._admin.describe_topics(self._names):
            name = str(topic["name"])
            check_described(topic)
            topic_ids[name] = str(topic["topic_id"])
            places += [TopicPartition(name, int(part["partition_index"])) for part in topic["partitions"]]
        return topic_ids, sorted(places)


def digest_of(record: Any) -> str:
    """Return a digest that distinguishes a record from another record at its offset."""
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    parts = (record.data,) if isinstance(record, UndecodableBatch) else (record.key, record.value)
    for part in parts:
        hashed.update(b"-" if part is None else b"%d:" % len(part) + part)
    return hashed.hexdigest()


def _epoch(record: Any) -> int | None:
    epoch = getattr(record, "leader_epoch", None)
    return None if epoch is None or epoch < 0 else int(epoch)


def _end(record: Any) -> int:
    return int(record.why.last_offset if isinstance(record, UndecodableBatch) else record.offset) + 1
