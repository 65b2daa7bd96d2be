"""Reading a topic resumes at its position if the log is the same, and otherwise restarts from the beginning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kafka import TopicPartition

from services.settings.topic_reader import Mark, TopicReader

PLACE = TopicPartition("items", 0)


@dataclass
class Written:
    """A record as the client returns it."""

    offset: int
    key: bytes
    value: bytes
    leader_epoch: int


@dataclass
class Broker:
    """A topic of one partition in memory: admin, consumer and `BrokerLog` in one."""

    knows_epochs: bool = True
    topic_id: str = "t"
    records: list[Written] = field(default_factory=list)
    epoch: int = 0
    end: int = 0
    at: int = 0

    def send(self, *values: str) -> None:
        for value in values:
            self.records.append(Written(self.end, value[:1].encode(), value.encode(), self.epoch))
            self.end += 1

    def cut(self, end: int) -> None:
        """Truncate the log, under a new leader."""
        self.records = [record for record in self.records if record.offset < end]
        self.end, self.epoch = end, self.epoch + 1

    def compact(self) -> None:
        self.records = list({record.key: record for record in self.records}.values())

    def describe_topics(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [{"name": names[0], "topic_id": self.topic_id, "error_code": 0, "partitions": [{"partition_index": 0}]}]

    def assign(self, places: Sequence[TopicPartition]) -> None:
        assert list(places) == [PLACE]

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.at = offset

    def position(self, partition: TopicPartition) -> int:
        return self.at

    def beginning_offsets(self, places: Sequence[TopicPartition], timeout_ms: int) -> Mapping[TopicPartition, int]:
        return dict.fromkeys(places, 0)

    def poll(self, timeout_ms: int) -> dict[TopicPartition, list[Written]]:
        """Return all records from the position on."""
        records = [record for record in self.records if record.offset >= self.at]
        self.at = max(self.at, self.end)
        return {PLACE: records} if records else {}

    def intact_until(self, partition: int, offset: int, leader_epoch: int | None) -> int:
        """Return the end of the log, or of this epoch."""
        self.at = 0  # the comparison moves the consumer
        later = [
            record.offset for record in self.records if leader_epoch is not None and record.leader_epoch > leader_epoch
        ]
        return min(offset, self.end, *(later if self.knows_epochs else []))

    def record_at(self, partition: int, offset: int) -> Written:
        return next(record for record in self.records if record.offset >= offset)


def open_reader(broker: Broker, before: TopicReader | None = None) -> TopicReader:
    """Return a reader that resumes another reader's position."""
    reader = TopicReader(broker, broker, ["items"], logs=lambda _name: broker)
    reader.resume(before.topic_ids if before else {}, before.marks if before else {})
    return reader


def values(fetched: Mapping[TopicPartition, Sequence[Any]]) -> list[str]:
    return [record.value.decode() for record in fetched.get(PLACE, ())]


def until_empty(reader: TopicReader) -> list[str]:
    return [value for _ in range(3) for value in values(reader.poll(0))]


@pytest.mark.parametrize(("knows_epochs", "is_running"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("cut_to", [0, 2, 4])
def test_a_log_that_came_back_shorter_and_grew_is_read_again(knows_epochs: bool, is_running: bool, cut_to: int) -> None:
    """A record at an offset that was read before is not skipped; without epochs, after the next connection."""
    broker = Broker(knows_epochs)
    broker.send("a show", "b show", "c show", "d show", "e show")
    reader = open_reader(broker)
    assert len(until_empty(reader)) == 5
    broker.cut(cut_to)
    broker.send("a hide", *(f"{key} new" for key in "fghij"))
    if not is_running:
        reader = open_reader(broker, reader)

    assert "a hide" in until_empty(reader)
    assert (reader.num_begun_again > 0, reader.marks[PLACE].offset) == (True, broker.end)


@pytest.mark.parametrize("knows_epochs", [True, False])
def test_a_log_that_is_the_same_is_not_read_twice(knows_epochs: bool) -> None:
    """An unchanged log is read once, across restarts and under a new leader without data loss."""
    broker = Broker(knows_epochs)
    broker.send("a show", "b show")
    reader = open_reader(broker)
    assert until_empty(reader) == ["a show", "b show"]
    broker.epoch += 1
    broker.send("c show")
    assert until_empty(reader) == ["c show"]
    broker.send("a hide")

    assert until_empty(open_reader(broker, reader)) == ["a hide"]


@pytest.mark.parametrize(("knows_epochs", "num_read"), [(True, 1), (False, 3)])
def test_where_compaction_has_removed_the_last_record_leader_epochs_decide(knows_epochs: bool, num_read: int) -> None:
    """Without leader epochs the log is read again, which costs only time."""
    broker = Broker(knows_epochs)
    broker.send("b show", "c show", "a show")
    reader = open_reader(broker)
    until_empty(reader)
    broker.send("a hide")
    broker.compact()

    assert len(until_empty(open_reader(broker, reader))) == num_read


@pytest.mark.parametrize(
    ("topic_id", "mark"),
    [("another", Mark(1, 0, (0, "x"))), ("t", Mark(1, 0, (0, "x"))), ("t", Mark(1)), ("t", Mark(9, 0))],
)
def test_a_mark_that_does_not_fit_is_as_none(topic_id: str, mark: Mark) -> None:
    """Marks of a recreated topic, of another record, without a record, and beyond the end restart the reading."""
    broker = Broker()
    broker.send("a show", "b show")
    reader = TopicReader(broker, broker, ["items"], logs=lambda _name: broker)
    reader.resume({"items": topic_id}, {PLACE: mark})

    assert until_empty(reader) == ["a show", "b show"]
