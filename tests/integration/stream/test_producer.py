"""The producer with a real broker: acknowledgement, quick refusal during an outage, and recovery after a restart."""

import asyncio
import gc
import threading
import time

import psutil
import pytest
from kafka import KafkaProducer
from kafka.producer.producer_batch import ProducerBatch

from services.errors import DependencyUnavailable, Overloaded
from services.gateway.events.producer import TopicProducer
from services.settings.addresses import KafkaAddress
from services.settings.kafka_clients import close_producer, open_client
from tests.support.servers import Server, free_port
from tests.support.stream.topics import read_topic
from tests.support.wait import until, until_answer, wait_for

TOPIC = "interactions"
ACK_S = 2.0


def read_all(broker: Server) -> list[tuple[int, bytes, bytes]]:
    return [(record.partition, record.key, record.value) for _topic_id, record in read_topic(broker, TOPIC)]


def producer_of(broker: Server, max_in_flight: int = 100, gather_s: float = 0.0) -> TopicProducer:
    """A started producer."""
    producer = TopicProducer(KafkaAddress(bootstrap=broker.address), TOPIC, ACK_S, max_in_flight, gather_s)
    producer.start()
    return producer


async def test_records_are_in_the_topic_when_the_call_returns(broker: Server) -> None:
    """All records arrive, and records of one key are in one partition, in order."""
    producer = producer_of(broker)

    await producer.record([(b"u1", b"%d" % number) for number in range(50)])
    await producer.record([(b"u2", b"x"), (b"u3", b"y")])

    records = await asyncio.to_thread(read_all, broker)
    mine = [(partition, value) for partition, key, value in records if key == b"u1"]
    assert len(records) == 52
    assert len({partition for partition, _ in mine}) == 1
    assert [value for _, value in mine] == [b"%d" % number for number in range(50)]
    await asyncio.to_thread(producer.stop)


async def test_records_of_one_call_are_one_batch_per_partition(broker: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further batch costs the broker and every reader an exchange, also if the records are 100 KB together."""
    producer = producer_of(broker)
    await producer.record([(b"u", b"first")])
    batches: list[ProducerBatch] = []
    complete = ProducerBatch.complete

    def counted(batch: ProducerBatch, *outcome: int) -> bool:
        batches.append(batch)
        return bool(complete(batch, *outcome))

    monkeypatch.setattr(ProducerBatch, "complete", counted)

    await producer.record([(b"u", b"%0200d" % number) for number in range(500)])

    assert sum(batch.record_count for batch in batches) == 500
    assert len(batches) <= 2  # two if the sender happens to wake meanwhile
    await asyncio.to_thread(producer.stop)


async def test_records_of_many_batches_arrive_in_order(broker: Server) -> None:
    """One call's records of a key keep their order across batches."""
    producer = producer_of(broker)

    sent = [b"%d" % number + 10_000 * b" " for number in range(100)]
    await producer.record([(b"u", value) for value in sent])

    records = await asyncio.to_thread(read_all, broker)
    assert [value for _, _, value in records] == sent
    await asyncio.to_thread(producer.stop)


async def test_gathered_records_arrive_in_order_and_before_the_end(broker: Server) -> None:
    """Records that arrive while a batch gathers are sent, even if the producer is stopped meanwhile."""
    producer = producer_of(broker, gather_s=0.3)
    outcomes: list[bool] = []

    for number in range(30):
        assert producer.offer((b"u", b"%d" % number), outcomes.append)
        await asyncio.sleep(0.01)
    await asyncio.to_thread(producer.stop)

    records = await asyncio.to_thread(read_all, broker)
    assert [value for _, _, value in records] == [b"%d" % number for number in range(30)]
    assert outcomes == [True] * 30


async def test_the_loop_stays_free_while_records_wait(broker: Server) -> None:
    """Without a broker the call is refused in time without blocking the event loop."""
    producer = producer_of(broker)
    await producer.record([(b"u", b"1")])
    broker.kill()
    num_turns = 0

    async def others() -> None:
        """Count the turns."""
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0.01)

    running = asyncio.create_task(others())
    started_s = time.monotonic()
    with pytest.raises(DependencyUnavailable) as caught:
        await producer.record([(b"u", b"2")])
    took_s = time.monotonic() - started_s
    running.cancel()

    assert caught.value.retry_after_s > 0
    assert took_s < 10 * ACK_S
    assert num_turns > 10
    await asyncio.to_thread(producer.stop)


async def test_a_broker_that_lost_everything_is_used_again(broker: Server) -> None:
    """After a restart with new topics records are acknowledged again, and stored."""
    producer = producer_of(broker)
    await producer.record([(b"u", b"old")])
    await asyncio.to_thread(broker.kill)
    with pytest.raises(DependencyUnavailable):
        await producer.record([(b"u", b"lost")])
    await asyncio.to_thread(broker.start)

    num_attempts = 0

    async def accepted() -> bool:
        nonlocal num_attempts
        num_attempts += 1
        await producer.record([(b"u", b"new")])
        return True

    await until_answer(accepted, passing=DependencyUnavailable)

    values = [value for _, _, value in await asyncio.to_thread(read_all, broker)]
    assert values.count(b"new") >= 1
    assert b"old" not in values
    assert num_attempts <= 4
    await asyncio.to_thread(producer.stop)


async def test_without_a_broker_nothing_blocks_and_the_rest_is_dropped() -> None:
    """Offers over the limit are refused at once, even before the start; accepted records are reported as failed."""
    producer = TopicProducer(KafkaAddress(bootstrap=f"127.0.0.1:{free_port()}"), TOPIC, 0.3, 5)
    outcomes: list[bool] = []

    taken = [producer.offer((b"u", b"1"), outcomes.append) for _ in range(20)]
    producer.start()
    with pytest.raises((Overloaded, DependencyUnavailable)):
        await producer.record([(b"u", b"1")])
    await until(lambda: len(outcomes) == 5)

    assert taken == [True] * 5 + [False] * 15
    assert outcomes == [False] * 5
    await asyncio.to_thread(producer.stop)


async def test_a_broker_that_hangs_costs_no_thread_and_no_descriptor(broker: Server) -> None:
    """Failed attempts to connect to an unresponsive broker leave no threads or sockets behind."""
    await asyncio.to_thread(gc.collect)  # creates the thread that stops the producer
    process = psutil.Process()
    before = threading.active_count(), process.num_fds()
    broker.freeze()
    producer = producer_of(broker)

    for _ in range(2):
        with pytest.raises(DependencyUnavailable):
            await producer.record([(b"u", b"1")])
    broker.thaw()
    await asyncio.to_thread(producer.stop)

    assert (threading.active_count(), process.num_fds()) == before


def test_a_producer_with_unacknowledged_records_ends(broker: Server) -> None:
    """Closing drops records that an unresponsive broker has not acknowledged; no thread stays."""
    before = threading.active_count()
    producer = open_client(KafkaProducer, KafkaAddress(bootstrap=broker.address))
    producer.send(TOPIC, b"1").get(timeout=20)
    broker.freeze()
    producer.send(TOPIC, b"2")

    close_producer(producer, 0.1)

    wait_for(lambda: threading.active_count() == before, 20.0, "the end of the producer's threads")
    broker.thaw()
