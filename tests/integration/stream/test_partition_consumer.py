"""A consumer at a real broker: dead letters of any kind, and topic changes."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.errors import IncompatibleBrokerVersion, MessageSizeTooLargeError
from kafka.protocol.consumer.offsets import OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse

from services.errors import ConfigError, DependencyUnavailable
from services.features.schema import LogPosition
from services.gateway.events.producer import TopicProducer
from services.settings.addresses import KafkaAddress
from services.settings.arrivals import ArrivalFile
from services.settings.broker_log import BrokerLog
from services.settings.fetch_pace import FetchWaits
from services.stream.decode import DeadLetter, Misplaced, Record, decode
from services.stream.partition_consumer import LogAddress, PartitionConsumer
from tests.support.servers import Server
from tests.support.stream.topics import read_topic
from tests.support.wait import wait_for

DEAD = "interactions.dlq"


@dataclass
class GrownTopic:
    """A broker whose topic now has three partitions; the embedded broker cannot add partitions."""

    topic_id: str

    def describe_topics(self, _topics: list[str]) -> list[dict[str, Any]]:
        return [{"error_code": 0, "topic_id": self.topic_id, "partitions": [{}, {}, {}]}]


@pytest.fixture
def address(broker: Server) -> LogAddress:
    return LogAddress(
        KafkaAddress(bootstrap=broker.address), "interactions", DEAD, "group", num_partitions=1, max_poll_records=3
    )


def test_a_broker_that_does_not_answer_costs_no_thread_and_no_descriptor(broker: Server, address: LogAddress) -> None:
    """Two failed attempts to connect to an unresponsive broker leave no threads or sockets behind."""
    gc.collect()
    process = psutil.Process()
    gc.collect()  # an earlier test's descriptors must not close meanwhile
    before = threading.active_count(), process.num_fds()
    broker.freeze()

    for _ in range(2):
        with pytest.raises(DependencyUnavailable):
            PartitionConsumer(address)
    broker.thaw()

    assert (threading.active_count(), process.num_fds()) == before


@pytest.fixture
def consumer(address: LogAddress) -> Iterator[PartitionConsumer]:
    """A consumer of the topic, with an empty log."""
    consumer = PartitionConsumer(address)
    consumer.assign(consumer.wanted, lambda partition, _committed: LogPosition("t", partition, 0))
    yield consumer
    consumer.close()


def produce(broker: Server, *values: bytes, **options: Any) -> None:
    """Send records of one user, and wait until the broker has them."""
    producer = KafkaProducer(bootstrap_servers=broker.address, linger_ms=50, **options)
    for receipt in [producer.send("interactions", key=b"u", value=value) for value in values]:
        receipt.get(10)
    producer.close()


@dataclass
class EpochBroker:
    """Connections of a KafkaConsumer to a broker with leader epochs: reads request bytes, returns response bytes."""

    end_offset: int
    error_code: int = 0
    cluster: Any = None

    def run(self, ask: Any) -> Any:
        return asyncio.run(ask())

    async def send(self, request: Any, node_id: int) -> Any:
        """Answer a request to the leader."""
        assert node_id == LEADER
        (topic,) = OffsetForLeaderEpochRequest.decode(request.encode(version=4), version=4).topics
        (asked,) = topic.partitions
        result = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult
        ended = result.EpochEndOffset(
            error_code=self.error_code,
            partition=asked.partition,
            leader_epoch=asked.leader_epoch,
            end_offset=self.end_offset,
        )
        answer = OffsetForLeaderEpochResponse(topics=[result(topic=topic.topic, partitions=[ended])])
        return OffsetForLeaderEpochResponse.decode(answer.encode(version=4), version=4)


LEADER = 111


@pytest.mark.parametrize(("end_of_epoch", "intact"), [(40, 5), (3, 3), (-1, 4)])
def test_a_log_is_intact_as_far_as_the_epoch_of_its_last_record_reaches(
    consumer: PartitionConsumer, broker: Server, monkeypatch: pytest.MonkeyPatch, end_of_epoch: int, intact: int
) -> None:
    """KIP-320: records lost in an epoch were replaced, however long the log; an unknown epoch is another record."""
    produce(broker, *[b"x"] * 10)
    asked = consumer.broker_log
    without_epochs = asked.knows_epochs, asked.intact_until(0, 5, 3), asked.intact_until(0, 30, None)
    with pytest.raises(IncompatibleBrokerVersion):
        asked._end_of_epoch(TopicPartition("interactions", 0), 3)
    monkeypatch.setattr(BrokerLog, "knows_epochs", True)
    connections = EpochBroker(end_of_epoch, cluster=consumer._consumer._manager.cluster)

    own, end_of_epoch = asked._consumer._manager, asked._end_of_epoch

    def end_at(*about: Any) -> int | None:
        """Ask for an epoch's end over these connections, then restore the consumer's own."""
        monkeypatch.setattr(asked._consumer, "_manager", connections)
        try:
            return end_of_epoch(*about)
        finally:
            monkeypatch.setattr(asked._consumer, "_manager", own)

    monkeypatch.setattr(asked, "_end_of_epoch", end_at)
    with_epochs = asked.intact_until(0, 5, 3)

    assert without_epochs == (False, 5, 10)
    assert with_epochs == intact


def letter(offset: int, key: bytes | None, value: bytes | None) -> DeadLetter:
    return DeadLetter(Record(LogPosition("t", 0, offset), key, value, 0), "because")


def test_a_record_too_large_for_the_dead_letter_topic_leaves_its_place(
    consumer: PartitionConsumer, broker: Server
) -> None:
    """A compressed record may be too large to copy: its headers are copied, and later records too."""
    consumer.dead_letter([letter(0, b"u", b"x" * 2_000_000), letter(1, b"u", b"small")])

    records = sorted(
        (record for _, record in read_topic(broker, DEAD)), key=lambda record: dict(record.headers)["offset"]
    )
    headers = dict(records[0].headers)
    assert [record.value for record in records] == [b"", b"small"]
    assert (headers["left_out_bytes"], headers["reason"]) == (b"2000001", b"because")


def test_misplaced_records_that_the_broker_refuses_for_their_size_are_returned(
    consumer: PartitionConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker's refusal for size is in the receipt; test_stream_worker.py covers records that the client refuses."""
    misplaced = [Misplaced(Record(LogPosition("t", 0, offset), b"u", b"x", 0), 0) for offset in (0, 1)]
    monkeypatch.setattr(consumer, "_producer", RefusingProducer())

    assert consumer.reroute(misplaced) == misplaced


class RefusingProducer:
    """A producer for a broker that refuses a batch for its size."""

    def send(self, *_: Any, **__: Any) -> Any:
        return self

    def get(self, **_: Any) -> None:
        raise MessageSizeTooLargeError


class LatinName(str):
    """A header name that a client sends as Latin-1."""

    def encode(self, *_: Any) -> bytes:
        return b"caf\xe9"


def test_a_header_that_is_not_utf8_stops_nothing(address: LogAddress, broker: Server) -> None:
    """The undecodable record and the rest of its batch become one dead letter with offsets; other records are read."""
    address = replace(address, num_partitions=2)
    consumer = PartitionConsumer(address)
    consumer.assign(consumer.wanted, lambda partition, _committed: LogPosition("t", partition, 0))
    producer = KafkaProducer(bootstrap_servers=broker.address, linger_ms=200)
    for names in (("", "", "bad", ""), ("", "")):
        for name, partition in itertools.product(names, (0, 1)):
            headers = [(LatinName(name), b"1")] if name and partition else []
            producer.send(address.topic, value=b"{}", headers=headers, partition=partition)
        producer.flush(5)
    producer.close()
    records: list[Record] = []
    wait_for(lambda: len(found_with(records, consumer)) >= 11, 20.0, "all records")
    consumer.close()

    places = [(record.position.partition, record.position.offset, record.last_position.offset) for record in records]
    assert sorted(places) == [(0, n, n) for n in range(6)] + [(1, 0, 0), (1, 1, 1), (1, 2, 3), (1, 4, 4), (1, 5, 5)]
    assert [dead_letter.reason[:7] for dead_letter in decode(records, 2, 0).dead if dead_letter.record.undecodable] == [
        "headers"
    ]


def found_with(records: list[Record], consumer: PartitionConsumer) -> list[Record]:
    """Add the next poll's result."""
    records += consumer.poll(50)
    return records


def test_a_record_of_nothing_is_a_dead_letter_too(consumer: PartitionConsumer, broker: Server) -> None:
    """A record with neither key nor value does not end the worker."""
    consumer.dead_letter([letter(0, None, None)])

    ((_, record),) = read_topic(broker, DEAD)
    assert (record.key, record.value, dict(record.headers)["offset"]) == (None, b"", b"0")


def test_lag_counts_every_record_of_a_batch(consumer: PartitionConsumer, broker: Server) -> None:
    """Lag includes fetched records that `poll` still holds, even if the broker reports the last batch's start."""
    produce(broker, *[b"x"] * 10)

    given = 0
    while not given:
        given = len(consumer.poll(200))

    assert given < 10
    assert consumer.lag() == {0: 10 - given}


def test_records_of_an_open_transaction_are_not_read(consumer: PartitionConsumer, broker: Server) -> None:
    """A transaction's records are read once it is committed; its marker, which takes an offset, adds no lag."""
    producer = KafkaProducer(bootstrap_servers=broker.address, transactional_id="job", acks="all")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send("interactions", key=b"u", value=b"in a transaction", partition=0).get(10)
    while_open = [record.value for _ in range(5) for record in consumer.poll(50)]
    producer.commit_transaction()
    records: list[Record] = []
    wait_for(lambda: found_with(records, consumer), 10.0, "the committed record")
    wait_for(lambda: not consumer.poll(50) and consumer.lag() == {0: 0}, 10.0, "the position behind the marker")
    producer.close()

    assert while_open == []
    assert [record.value for record in records] == [b"in a transaction"]


def test_added_partitions_end_the_consumer(consumer: PartitionConsumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that gained partitions is reopened, because the new partitions hold events too."""
    consumer.check_topic()
    monkeypatch.setattr(consumer, "_admin", GrownTopic(consumer.topic_id))

    with pytest.raises(DependencyUnavailable):
        consumer.check_topic()


def test_a_topic_of_another_number_of_partitions_is_refused(consumer: PartitionConsumer, address: LogAddress) -> None:
    """A topic created with one partition is refused, since readers expect two."""
    consumer.check_topic()

    with pytest.raises(
        ConfigError, match="TAILRACE_TOPIC_PARTITIONS: 2, but topic interactions has 1 partitions; set it to 1"
    ):
        PartitionConsumer(replace(address, num_partitions=2))


async def test_a_producer_on_this_machine_wakes_the_consumer(address: LogAddress, tmp_path: Path) -> None:
    """A consumer that would otherwise fetch once an hour returns each record that a producer of this machine sends."""
    hourly = replace(address, arrivals_dir=tmp_path, fetch_waits=FetchWaits(25, 75, untouched_ms=3_600_000))
    consumer = await asyncio.to_thread(PartitionConsumer, hourly)
    await asyncio.to_thread(consumer.assign, (0,), lambda partition, _: LogPosition(consumer.topic_id, partition, 0))
    producer = TopicProducer(address.kafka, address.topic, 10.0, 10, arrivals_dir=tmp_path)
    producer.start()
    values: list[bytes | None] = []

    def read_two() -> None:
        while len(values) < 2:
            values.extend(record.value for record in consumer.poll(100))

    reading = asyncio.create_task(asyncio.to_thread(read_two))
    for value in (b"first", b"second"):
        await producer.record([(b"user", value)])
        await asyncio.to_thread(wait_for, lambda value=value: value in values, 30.0, "the record")  # type: ignore[misc]
    await reading

    assert values == [b"first", b"second"]
    await asyncio.to_thread(producer.stop)
    consumer.close()


def test_a_long_topic_is_read_as_soon_as_a_short_one(address: LogAddress, broker: Server, tmp_path: Path) -> None:
    """The embedded broker takes longer over many batches, and a fetch that it could not answer in time is repeated."""
    consumer = PartitionConsumer(replace(address, arrivals_dir=tmp_path, max_poll_records=10_000))
    consumer.assign((0,), lambda partition, _committed: LogPosition("t", partition, 0))
    producer = KafkaProducer(bootstrap_servers=broker.address)
    for _ in range(2_000):
        producer.send("interactions", key=b"u", value=b"{}").get(10)
    num_read = 0
    while num_read < 2_000:
        num_read += len(consumer.poll(100))

    producer.send("interactions", key=b"u", value=b"last").get(10)
    ArrivalFile(tmp_path, "interactions").touch()
    read = [record.value for _ in range(8) for record in consumer.poll(100)]
    producer.close()
    consumer.close()

    assert read[-1] == b"last"
