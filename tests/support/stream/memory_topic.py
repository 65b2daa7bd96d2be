"""A topic in memory with what the worker needs of a consumer, for tests that inject faults between any two steps."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from services.contracts.events import Interaction
from services.features.ownership import partition_of
from services.features.schema import LogPosition
from services.stream.decode import DeadLetter, Misplaced, Record


class MemoryTopic:
    """The records of each partition, and the offsets committed."""

    def __init__(self, num_partitions: int) -> None:
        self.records: list[list[Record]] = [[] for _ in range(num_partitions)]
        self.committed: dict[int, int] = {}

    def send(self, event: Interaction) -> None:
        """Append an event to its user's partition."""
        partition = partition_of(event.user_id, len(self.records))
        own = self.records[partition]
        own.append(
            Record(LogPosition("t", partition, len(own)), event.key, event.encode(), timestamp_ms=event.event_time_ms)
        )


class MemoryConsumer:
    """Reads its partitions, some records at a time; sets `stop` when it has them all and nothing is left."""

    topic_id = "t"

    def __init__(self, topic: MemoryTopic, stop: threading.Event, batch: int = 3) -> None:
        self._topic = topic
        self._stop = stop
        self._batch = batch
        self._next: dict[int, int] = {}
        self.num_partitions = len(topic.records)
        self.wanted = tuple(range(self.num_partitions))

    @property
    def partitions(self) -> tuple[int, ...]:
        """What is assigned."""
        return tuple(self._next)

    def assign(self, partitions: Sequence[int], start: Callable[[int, int], int]) -> None:
        """Begin where the worker says."""
        self._next = {number: start(number, self._topic.committed.get(number, 0)) for number in partitions}

    def poll(self, wait_ms: int) -> list[Record]:
        """Return the next records of every partition."""
        found: list[Record] = []
        for number, at in self._next.items():
            own = self._topic.records[number][at : at + self._batch]
            self._next[number] += len(own)
            found += own
        if not found and len(self._next) == self.num_partitions:
            self._stop.set()
        elif not found:
            time.sleep(wait_ms / 1_000)
        return found

    def commit(self, next_offsets: Mapping[int, int]) -> None:
        """Commit offsets."""
        self._topic.committed |= next_offsets

    def lag(self) -> dict[int, int]:
        """Return what is left."""
        return {number: len(self._topic.records[number]) - at for number, at in self._next.items()}

    def dead_letter(self, letters: Sequence[DeadLetter]) -> None:
        """Refuse: no test sends such records."""
        assert not letters

    def reroute(self, misplaced: Sequence[Misplaced]) -> None:
        """Refuse: no test sends such records."""
        assert not misplaced

    def check_topic(self) -> None:
        """Do nothing: it is the same."""

    def close(self) -> None:
        """Do nothing."""
