"""An in-memory topic with the consumer interface of the worker, for fault injection between any two steps."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from services.contracts.events import Interaction
from services.errors import DependencyUnavailable
from services.features.ownership import partition_of
from services.features.schema import LogPosition
from services.stream.decode import DeadLetter, Misplaced, Record


class MemoryTopic:
    """The records of each partition, the committed positions, and the start of each leader epoch by partition."""

    def __init__(self, num_partitions: int) -> None:
        self.records: list[list[Record]] = [[] for _ in range(num_partitions)]
        self.committed: dict[int, LogPosition] = {}
        self.epoch_begins: list[list[int]] = [[0] * num_partitions]

    @property
    def leader_epoch(self) -> int:
        return len(self.epoch_begins) - 1

    def send(self, event: Interaction) -> None:
        """Append an event to its user's partition."""
        partition = partition_of(event.user_id, len(self.records))
        own = self.records[partition]
        position = LogPosition("t", partition, len(own))
        own.append(Record(position, event.key, event.encode(), event.event_time_ms, leader_epoch=self.leader_epoch))

    def cut(self, num_lost: int) -> None:
        """Lose the newest records of each partition, as after a broker's power loss, and start a new leader epoch."""
        for own in self.records:
            del own[max(0, len(own) - num_lost) :]
        self.epoch_begins.append([len(own) for own in self.records])


class MemoryBrokerLog:
    """A broker's information about the topic, with epochs as in Kafka."""

    def __init__(self, topic: MemoryTopic, *, knows_epochs: bool) -> None:
        self._topic = topic
        self.knows_epochs = knows_epochs

    def begin(self, _partition: int) -> int:
        return 0

    def intact_until(self, partition: int, offset: int, leader_epoch: int | None) -> int:
        """Return the end of the log or of this epoch, if that is before the offset."""
        end = min(offset, len(self._topic.records[partition]))
        later = self._topic.epoch_begins[leader_epoch + 1 :] if self.knows_epochs and leader_epoch is not None else []
        return min([end, *(begins[partition] for begins in later)])

    def value_at(self, partition: int, offset: int) -> tuple[int, bytes | None]:
        return offset, self._topic.records[partition][offset].value


class MemoryConsumer:
    """Reads its partitions, some records at a time; sets `stop` when all are read. Fails once the log was truncated."""

    topic_id = "t"

    def __init__(self, topic: MemoryTopic, stop: threading.Event, batch: int = 3, *, knows_epochs: bool = True) -> None:
        self.broker_log = MemoryBrokerLog(topic, knows_epochs=knows_epochs)
        self._topic = topic
        self._leader_epoch = topic.leader_epoch
        self._log_ids: dict[int, str] = {}
        self._stop = stop
        self._batch = batch
        self._next: dict[int, int] = {}
        self.num_partitions = len(topic.records)
        self.wanted = tuple(range(self.num_partitions))

    @property
    def partitions(self) -> tuple[int, ...]:
        return tuple(self._next)

    def assign(self, partitions: Sequence[int], start: Callable[[int, LogPosition | None], LogPosition]) -> None:
        """Begin at the worker's position."""
        starts = {number: start(number, self._topic.committed.get(number)) for number in partitions}
        self._next = {number: first.offset for number, first in starts.items()}
        self._log_ids = {number: first.topic_id for number, first in starts.items()}

    def poll(self, wait_ms: int) -> list[Record]:
        """Return the next records of every partition."""
        self.check_topic()
        records: list[Record] = []
        for number, at in self._next.items():
            own = self._topic.records[number][at : at + self._batch]
            self._next[number] += len(own)
            records += [
                replace(record, position=replace(record.position, topic_id=self._log_ids[number])) for record in own
            ]
        if not records and len(self._next) == self.num_partitions:
            self._stop.set()
        elif not records:
            time.sleep(wait_ms / 1_000)
        return records

    def commit(self, positions: Mapping[int, LogPosition]) -> None:
        self._topic.committed |= positions

    def lag(self) -> dict[int, int]:
        return {number: len(self._topic.records[number]) - at for number, at in self._next.items()}

    def dead_letter(self, letters: Sequence[DeadLetter]) -> None:
        """Refuse: no test sends such records."""
        assert not letters

    def reroute(self, misplaced: Sequence[Misplaced]) -> None:
        """Refuse: no test sends such records."""
        assert not misplaced

    def check_topic(self) -> None:
        """Fail after a truncation, as a client does that follows the leader epochs."""
        if self._leader_epoch != self._topic.leader_epoch:
            raise DependencyUnavailable("broker", 0.0)

    def close(self) -> None:
        """Do nothing."""
