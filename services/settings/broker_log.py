"""A broker's view of a topic's logs: bounds, leader epochs, and single records."""

import time
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import (
    IncompatibleBrokerVersion,
    KafkaTimeoutError,
    LeaderNotAvailableError,
    OffsetOutOfRangeError,
    for_code,
)
from kafka.protocol.consumer.offsets import OffsetForLeaderEpochRequest

from services.settings.kafka_clients import broker_as_dependency
from services.settings.record_batches import UndecodableBatch

_REQUEST_MS = 5_000
_POLL_MS = 30
_UNFENCED = -1
_Topic: Any = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
_Partition: Any = _Topic.OffsetForLeaderPartition


class BrokerLog:
    """The logs of one topic. Every call raises DependencyUnavailable.

    It queries through a consumer, whose assignment it changes. kafka-python 3.0.12 only asks for the epochs of its own
    positions, through private connections: `knows_epochs` and `_end_of_epoch` use them, and their tests fail when these
    change.
    """

    def __init__(self, consumer: KafkaConsumer, topic: str) -> None:
        """Take a connected consumer without an assignment."""
        self._consumer = consumer
        self._topic = topic

    @property
    def knows_epochs(self) -> bool:
        """Return whether the broker can report where a leader epoch ends."""
        try:
            self._consumer._manager.broker_version_data.api_version(OffsetForLeaderEpochRequest)
        except IncompatibleBrokerVersion:
            return False
        return True

    def begin(self, partition: int) -> int:
        """Return the offset of the oldest record."""
        with broker_as_dependency():
            (begin,) = self._consumer.beginning_offsets([self._place(partition)], timeout_ms=_REQUEST_MS).values()
        return int(begin)

    def end(self, partition: int) -> int:
        """Return the offset after the newest record, which the embedded broker reports only to a fetch."""
        topic_partition = self._place(partition)
        with broker_as_dependency():
            (end,) = self._consumer.end_offsets([topic_partition], timeout_ms=_REQUEST_MS).values()
            return max(int(end), self._fetched_end(topic_partition, int(end)))

    def intact_until(self, partition: int, offset: int, leader_epoch: int | None) -> int:
        """Return how far this can be the log that was read up to `offset`, by its end and its leader epochs.

        `leader_epoch` is the epoch of the record before `offset` when it was read, if known.
        """
        topic_partition = self._place(partition)
        with broker_as_dependency():
            (end,) = self._consumer.end_offsets([topic_partition], timeout_ms=_REQUEST_MS).values()
            epoch_end: int | None = offset
            if leader_epoch is not None and self.knows_epochs:
                epoch_end = self._end_of_epoch(topic_partition, leader_epoch)
            if end < offset:  # or it is the embedded broker, which names the last batch's first record
                end = max(end, self._fetched_end(topic_partition, offset))
        return int(min(offset, end, offset - 1 if epoch_end is None else epoch_end))

    def value_at(self, partition: int, offset: int) -> tuple[int, bytes | None] | None:
        """Return offset and value of the first record at or after this offset, before the end; None if unreadable."""
        record = self.record_at(partition, offset)
        return None if isinstance(record, UndecodableBatch) else (int(record.offset), record.value)

    def record_at(self, partition: int, offset: int) -> Any:
        """Return the first record at or after this offset and before the end, or the undecodable batch there."""
        topic_partition = self._place(partition)
        with broker_as_dependency():
            self._seek(topic_partition, offset)
            give_up_s = time.monotonic() + _REQUEST_MS / 1_000
            while time.monotonic() < give_up_s:
                for (record,) in self._consumer.poll(_POLL_MS, max_records=1).values():
                    return record
            raise KafkaTimeoutError(f"no record of {topic_partition} from {offset}")

    def _fetched_end(self, topic_partition: TopicPartition, offset: int) -> int:
        """Return the end that a fetch from this offset reports; 0 if the fetch fails. Raises KafkaError."""
        self._seek(topic_partition, offset)
        give_up_s = time.monotonic() + _REQUEST_MS / 1_000
        while (end := self._consumer.highwater(topic_partition)) is None and time.monotonic() < give_up_s:
            try:
                self._consumer.poll(_POLL_MS, max_records=1)
            except OffsetOutOfRangeError:
                return 0
        if end is None:
            raise KafkaTimeoutError(f"no answer for {topic_partition}")
        return int(end)

    def _end_of_epoch(self, topic_partition: TopicPartition, leader_epoch: int) -> int | None:
        """Return the offset after the last record of this epoch, or of the newest earlier epoch; None without either.

        Raises KafkaError. The consumer must have asked for the partition's offsets before, which names its leader.
        """
        manager = self._consumer._manager
        leader = manager.cluster.leader_for_partition(topic_partition)
        if leader is None or leader < 0:
            raise LeaderNotAvailableError(topic_partition)
        asked = _Partition(
            partition=topic_partition.partition, current_leader_epoch=_UNFENCED, leader_epoch=leader_epoch
        )
        request = OffsetForLeaderEpochRequest(
            replica_id=-1, topics=[_Topic(topic=topic_partition.topic, partitions=[asked])]
        )

        async def ask() -> Any:
            return await manager.send(request, node_id=leader)

        ((answer,),) = (topic.partitions for topic in manager.run(ask).topics)
        if answer.error_code:
            raise for_code(answer.error_code)(topic_partition)
        return int(answer.end_offset) if answer.end_offset >= 0 else None

    def _seek(self, topic_partition: TopicPartition, offset: int) -> None:
        self._consumer.assign([topic_partition])
        self._consumer.seek(topic_partition, offset)

    def _place(self, partition: int) -> TopicPartition:
        return TopicPartition(self._topic, partition)
