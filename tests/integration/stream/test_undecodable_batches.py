"""The stream worker with a broker whose batches arrive corrupted, through the fault matrix' TCP proxy."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer

from benchmarks.faults.tcp_proxy import TcpProxy, Wire
from infra.local.binaries import tansu_command
from tests.support.servers import HOST, Server, free_port
from tests.support.stream.stream_rig import TOPIC, Rig, click
from tests.support.stream.topics import read_topic
from tests.support.wait import wait_for

MARK = b"poison"
LEFT = {"u": ("i1", "i5"), "another": ("i7",)}


class WiredBroker(Server):
    """A broker behind a proxy that changes a byte in each marked batch."""

    def __init__(self, log: Path) -> None:
        self._outer = free_port()
        super().__init__(partial(tansu_command, advertised=f"{HOST}:{self._outer}"), log)
        self._loop = asyncio.new_event_loop()
        self._proxy = TcpProxy(HOST, self._outer, self.port, corrupt=lambda piece: piece.replace(MARK, b"poisom"))
        self._thread = threading.Thread(target=self._loop.run_forever)

    @property
    def address(self) -> str:
        return f"{HOST}:{self._outer}"

    def start(self) -> None:
        """Start the broker and the proxy."""
        super().start()
        self._thread.start()
        self._run(self._proxy.__aenter__())

    def kill(self) -> None:
        """End both."""
        self._run(self._proxy.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        super().kill()

    def become(self, wire: Wire) -> None:
        self._run(self._proxy.become(wire))

    def _run(self, step: Coroutine[Any, Any, Any]) -> None:
        done: Future[object] = asyncio.run_coroutine_threadsafe(step, self._loop)
        done.result(10)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[WiredBroker]:
    """A fresh broker behind a proxy."""
    (tmp_path / "broker").mkdir()
    with WiredBroker(tmp_path / "broker/log") as server:
        yield server


def test_a_batch_that_arrives_changed_is_stepped_over(rig: Rig, broker: WiredBroker) -> None:
    """A batch with a persistent checksum error becomes one dead letter for its three events; all others are applied.

    tests/unit/settings/test_record_batches.py changes any byte, once or each time.
    """
    broker.become(Wire.CORRUPT)
    rig.start_worker()

    rig.send(click(1))
    producer = KafkaProducer(bootstrap_servers=rig.broker.address, linger_ms=200)
    for event in [click(number, event_type=MARK.decode()) for number in (2, 3, 4)]:
        producer.send(TOPIC, key=event.key, value=event.encode())
    producer.close()
    rig.send(click(5), click(7, "another"))

    wait_for(lambda: {user: row.item_ids for user, row in rig.rows("u", "another").items()} == LEFT, what="the others")
    wait_for(lambda: rig.metric("tailrace_stream_undecodable_batches_total", cause="checksum") == 1, what="the count")
    wait_for(lambda: rig.lags() == [0.0] * 4, what="no lag")
    rig.stop_worker()
    broker.become(Wire.PASS)
    ((_, letter),) = read_topic(broker, "interactions.dlq")
    headers = {name: value.decode() for name, value in letter.headers}
    assert rig.metric("tailrace_stream_dead_lettered_total") == 1
    assert (headers["topic"], headers["offset"], headers["last_offset"]) == (TOPIC, "1", "3")
    assert headers["reason"].startswith("checksum: ")
    assert f"offsets 1 to 3 of partition {headers['partition']}" in headers["reason"]
    assert letter.value.count(b"poisom") == 3
