"""A process follows the items topic on a real broker: loss and recreation of the topic, invalid records, snapshots."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from kafka import KafkaProducer

from benchmarks.faults.tcp_proxy import TcpProxy, Wire
from pipelines.imports.delivered import LiveCatalogue
from services.app import open_standby
from services.contracts.items import ItemState
from services.errors import DependencyUnavailable, ReaderBehind
from services.features.repo import RepoAddress
from services.items.follower import ItemFollower
from services.items.live_items import Change, Knowledge, LiveItems
from services.items.snapshot import Positions, read_snapshot, write_snapshot
from services.settings.addresses import KafkaAddress
from services.settings.kafka_clients import close_producer, open_reader
from services.settings.kafka_topics import Topic, create_missing
from services.settings.settings import Settings
from tests.support.servers import HOST, Server, free_port
from tests.support.wait import wait_for
from tests.unit.gateway.clients import in_process
from tests.unit.gateway.world import catalogue_of, publish

TOPIC = Topic(name="items", num_partitions=3, keep_ms=None)


class Process:
    """A process' item states and their follower; `makes_topic` and `writes` as in the first worker."""

    def __init__(self, broker: Server, snapshot: Path, *, is_worker: bool = False) -> None:
        self.num_refused = 0
        self.items = LiveItems()
        self.layout = self.items.lay(catalogue_of(8))
        self.follower = ItemFollower(
            self.items,
            KafkaAddress(bootstrap=broker.address),
            TOPIC.name,
            snapshot,
            makes=TOPIC if is_worker else None,
            write_every_s=0.1 if is_worker else None,
            on_refused=self._refused,
        )

    def _refused(self, number: int) -> None:
        self.num_refused += number

    def hides(self, item_id: str) -> bool:
        """Whether the item is known and may not be shown."""
        index = self.layout.index(item_id)
        return index is not None and not self.layout.columns.available[index]

    def shows(self, item_id: str) -> bool:
        """Whether the item may be shown."""
        index = self.layout.index(item_id)
        return index is not None and bool(self.layout.columns.available[index])


@pytest.fixture
def worker(broker: Server, tmp_path: Path) -> Iterator[Process]:
    """The started process that creates the topic and writes the snapshot."""
    process = Process(broker, tmp_path / "items" / "snapshot.parquet", is_worker=True)
    process.follower.start(30.0)
    yield process
    process.follower.stop()


def send(broker: Server, *records: tuple[bytes | None, bytes | None]) -> None:
    """Send records as an external producer does."""
    producer = KafkaProducer(bootstrap_servers=broker.address)
    try:
        for key, value in records:
            producer.send(TOPIC.name, key=key, value=value).get(30)
    finally:
        close_producer(producer, 1.0)


def test_a_process_that_starts_later_knows_what_was_stated_before(
    broker: Server, tmp_path: Path, worker: Process
) -> None:
    """Hidden, deleted and new items are known when the start returns, without a snapshot."""
    send(
        broker,
        (b"i01", b'{"available":false}'),
        (b"i02", None),
        (b"new", b'{"title":"New","categories":["fresh"],"attributes":{"price":2.5}}'),
        (b"i03", b'{"available":false}'),
        (b"i03", b'{"available":true}'),
    )
    late = Process(broker, tmp_path / "none")
    late.follower.start(30.0)
    try:
        assert [late.hides(item_id) for item_id in ("i00", "i01", "i02", "i03")] == [False, True, True, False]
        state = late.layout.shown_state("new")
        assert state is not None
        assert (state.title, state.categories, state.attributes) == ("New", ("fresh",), {"price": 2.5})
    finally:
        late.follower.stop()


def test_a_record_that_cannot_be_read_stops_nothing(broker: Server, worker: Process) -> None:
    """Invalid JSON, unknown fields, wrong types and invalid keys are counted and skipped."""
    send(
        broker,
        (b"i01", b"{"),
        (b"i01", b'{"availble":false}'),
        (b"i01", b'{"available":"no"}'),
        (b"\xff", b"{}"),
        (None, b'{"available":false}'),
        (b"i02", b'{"available":false}'),
        (b"i01", b"[]"),
    )

    wait_for(
        lambda: worker.hides("i02") and worker.num_refused == 6, what="the good record, and the count of the others"
    )
    assert worker.shows("i01")


def test_a_lost_broker_changes_nothing_and_a_topic_made_again_is_followed(
    broker: Server, tmp_path: Path, worker: Process
) -> None:
    """If the broker loses its topics, hidden items stay hidden and changes apply, also in new processes."""
    send(broker, (b"i01", b'{"available":false}'), (b"i04", b'{"available":false}'))
    wait_for(lambda: worker.hides("i01") and worker.hides("i04"), what="the first changes")
    wait_for((tmp_path / "items" / "snapshot.parquet").exists, what="the snapshot")
    broker.kill()
    assert worker.hides("i01")
    broker.start()
    wait_for(lambda: _sends(broker, b"i04", b'{"available":true}'), what="the topic made again")

    wait_for(lambda: worker.shows("i04"), what="a change after the loss")
    assert worker.hides("i01")
    late = Process(broker, tmp_path / "items" / "snapshot.parquet")
    late.follower.start(30.0)
    try:
        assert (late.hides("i01"), late.shows("i04")) == (True, True)
    finally:
        late.follower.stop()


@pytest.mark.parametrize("hidden", [{"available": False}, {"expires_ms": 10**12}, {"published_ms": 10**14}])
def test_an_older_record_shows_no_item_before_the_topic_was_read(
    hidden: dict[str, Any], broker: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item that the snapshot hides, expires or publishes later stays so although its first record shows it."""
    known, path = LiveItems(), tmp_path / "snapshot.parquet"
    known.apply([("i01", ItemState(item_id="i01", **hidden))])
    write_snapshot(path, known, Positions("a lost topic", {}))
    make_topic(broker)
    send(broker, (b"i01", b"{}"), (b"i01", json.dumps(hidden).encode()), (b"i02", b'{"available":false}'))
    monkeypatch.setattr("services.items.follower._MAX_RECORDS", 1)
    process, is_shown = Process(broker, path), []
    apply = process.items.apply

    def applied(changes: list[Change]) -> int:
        """Apply changes; note whether the item may be shown then."""
        num_left_out = apply(changes)
        is_shown.append(process.shows("i01"))
        return num_left_out

    monkeypatch.setattr(process.items, "apply", applied)
    process.follower.start(30.0)
    process.follower.stop()

    assert is_shown
    assert not any(is_shown)
    assert process.hides("i02")


def test_a_snapshot_of_another_log_under_the_same_topic_id_steps_over_nothing(
    broker: Server, tmp_path: Path, worker: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that returns shorter and outgrows the snapshot is read, and the start awaits its last change."""
    send(broker, (b"i01", b'{"available":true}'), (b"i02", b'{"available":false}'), (b"i03", b'{"available":true}'))
    send(broker, *((f"i0{number}".encode(), b'{"available":false}') for number in (4, 5, 6)))
    wait_for(lambda: worker.hides("i02") and worker.hides("i06"), what="the changes")
    worker.follower.stop()
    written, path = worker.follower.positions, tmp_path / "old.parquet"
    other, late = Process(broker, tmp_path / "none"), Process(broker, path)
    other.items.apply(
        [("i01", ItemState(item_id="i01", available=False)), ("i07", ItemState(item_id="i07", available=False))]
    )
    marks = {
        number: replace(mark, last=mark.last and (mark.last[0], "other")) for number, mark in written.marks.items()
    }
    write_snapshot(path, other.items, Positions(written.topic_id, marks))
    apply = late.items.apply
    monkeypatch.setattr(late.items, "apply", lambda changes: (time.sleep(0.2), apply(changes))[1])

    late.follower.start(30.0)
    try:
        hidden = [item_id for item_id in ("i01", "i02", "i03", "i04", "i05", "i06", "i07") if late.hides(item_id)]
        assert hidden == ["i02", "i04", "i05", "i06", "i07"]
        assert late.items.knowledge is Knowledge.CURRENT
    finally:
        late.follower.stop()


def test_without_broker_and_snapshot_no_state_is_known(tmp_path: Path, broker: Server) -> None:
    """The process knows whether it has nothing, the snapshot or the whole topic, and starts without the broker."""
    broker.kill()
    path = tmp_path / "snapshot.parquet"
    process, knowledge = Process(broker, path), []
    process.follower.start(5.0)
    knowledge.append(process.items.knowledge)
    process.follower.stop()
    write_snapshot(path, LiveItems(), Positions("t", {}))
    process = Process(broker, path)
    process.follower.start(5.0)
    try:
        knowledge.append(process.items.knowledge)
        broker.start()
        make_topic(broker)
        wait_for(lambda: process.items.knowledge is Knowledge.CURRENT, what="the topic's end")
    finally:
        process.follower.stop()

    assert knowledge == [Knowledge.NONE, Knowledge.SNAPSHOT]


@pytest.mark.parametrize("ending", ["restored", "removed"])
@pytest.mark.parametrize("loss", ["before", "during"])
def test_a_recreated_topic_does_not_replace_a_damaged_snapshot(
    tmp_path: Path, broker: Server, ending: str, loss: str
) -> None:
    """Hidden items are unknown until the file is restored or removed; until then no snapshot overwrites it.

    Also if the snapshot was written after the loss: the states from before are in no topic.
    """
    path = tmp_path / "snapshot.parquet"
    make_topic(broker)
    send(broker, (b"i01", b'{"available":false}'))
    writer = Process(broker, path, is_worker=True)
    writer.follower.start(30.0)
    if loss == "before":
        writer.follower.stop()
    broker.kill()
    broker.start()
    if loss == "during":
        wait_for(lambda: _sends(broker, b"i03", b'{"available":false}'), what="the topic made again")
        wait_for(lambda: writer.hides("i03"), what="the change after the loss")
        writer.follower.stop()
    whole = path.read_bytes()
    path.write_bytes(damaged := whole[:-1])
    process = Process(broker, path, is_worker=True)
    process.follower.start(5.0)
    try:
        send(broker, (b"i02", b'{"available":false}'))
        with pytest.raises(DependencyUnavailable):
            asyncio.run(process.follower.catch_up(5.0))
        knowledge, failure, kept = process.items.knowledge, process.follower.failure, path.read_bytes()
        path.write_bytes(whole) if ending == "restored" else path.unlink()
        wait_for(lambda: process.items.knowledge is Knowledge.CURRENT, what="the items")
        wait_for(lambda: process.hides("i02"), what="the topic's states")
    finally:
        process.follower.stop()

    assert (knowledge, kept) == (Knowledge.NONE, damaged)
    assert failure == f"{path}: damaged snapshot of items; restore it, or remove {path} to begin without items"
    assert process.hides("i01") is (ending == "restored")


def test_the_topic_of_all_states_replaces_a_damaged_snapshot(tmp_path: Path, broker: Server) -> None:
    """The damaged file is written again."""
    path = tmp_path / "snapshot.parquet"
    make_topic(broker)
    for item_id in (b"i01", b"i02"):
        send(broker, (item_id, b'{"available":false}'))
        process = Process(broker, path, is_worker=True)
        process.follower.start(30.0)
        process.follower.stop()
        assert read_snapshot(path, LiveItems()) == process.follower.positions
        path.write_bytes(b"damaged")

    process = Process(broker, path, is_worker=True)
    process.follower.start(30.0)
    process.follower.stop()
    assert (process.items.knowledge, process.hides("i01"), process.hides("i02")) == (Knowledge.CURRENT, True, True)
    assert read_snapshot(path, LiveItems()) == process.follower.positions


def test_states_are_written_also_while_the_broker_is_unavailable(
    broker: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker may lose its topics: the last changes before that are in the snapshot too."""
    monkeypatch.setattr("services.items.follower._CHECK_EVERY_S", 3_600.0)
    path = tmp_path / "snapshot.parquet"
    process, later = Process(broker, path, is_worker=True), LiveItems()
    process.follower.start(30.0)
    try:
        send(broker, (b"i01", b'{"available":false}'))
        wait_for(lambda: process.hides("i01"), what="the change")
        broker.kill()
        monkeypatch.setattr("services.items.follower._CHECK_EVERY_S", 0.0)
        wait_for(path.exists, what="the snapshot")
        written, read_until = read_snapshot(path, later), process.follower.positions
        broker.start()
        wait_for(lambda: process.follower.positions.topic_id != read_until.topic_id, what="the topic made again")
    finally:
        process.follower.stop()

    assert written == read_until
    assert later.hides("i01")


def test_states_are_written_only_once_all_are_known(
    broker: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of half a topic would let a gateway without a broker show the items hidden in the other half."""
    make_topic(broker)
    send(broker, *((f"i{number:02}".encode(), b'{"available":false}') for number in range(8)))
    path = tmp_path / "snapshot.parquet"
    monkeypatch.setattr("services.items.follower._CHECK_EVERY_S", 0.0)
    monkeypatch.setattr("services.items.follower._MAX_RECORDS", 1)
    process, num_known = Process(broker, path, is_worker=True), []
    apply, layout = process.items.apply, process.items.layout

    def applied(changes: list[Change]) -> int:
        """Apply changes; note how many states a snapshot written by now has."""
        if path.exists():
            read = LiveItems()
            read_snapshot(path, read)
            num_known.append(int((read.layout.status != 0).sum()))
        return apply(changes)

    monkeypatch.setattr(process.items, "apply", applied)
    process.follower.start(30.0)
    wait_for(path.exists, what="the snapshot")
    process.follower.stop()

    assert num_known == []
    assert int((layout.status != 0).sum()) == 8


def make_topic(broker: Server) -> None:
    with ExitStack() as clients:
        admin, _ = open_reader(
            KafkaAddress(bootstrap=broker.address), clients, fetch_max_wait_ms=50, max_poll_records=1
        )
        create_missing(admin, [TOPIC])


def _sends(broker: Server, key: bytes, value: bytes) -> bool:
    try:
        send(broker, (key, value))
    except Exception:  # noqa: BLE001 - the topic is not there yet
        return False
    return True


async def test_catching_up_waits_for_what_the_topic_holds(broker: Server, worker: Process) -> None:
    """A refresh returns once every previously acknowledged record is known."""
    for number in range(20):
        value = b'{"available":false}' if number % 2 else b'{"available":true}'
        await asyncio.to_thread(send, broker, (b"i05", value))
        await worker.follower.catch_up(10.0)
        assert worker.hides("i05") == bool(number % 2)


def test_records_after_the_call_are_not_awaited(
    broker: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catching up ends although records keep coming faster than they are read, as during an import."""
    monkeypatch.setattr("services.items.follower._MAX_RECORDS", 1)
    make_topic(broker)
    process, is_caught_up = Process(broker, tmp_path / "none"), threading.Event()
    apply = process.items.apply
    monkeypatch.setattr(process.items, "apply", lambda changes: (time.sleep(0.1), apply(changes))[1])
    process.follower.start(30.0)

    def keep_sending() -> None:
        """Send records until the reader has caught up."""
        producer = KafkaProducer(bootstrap_servers=broker.address)
        while not is_caught_up.wait(0.02):
            producer.send(TOPIC.name, key=b"i01", value=b'{"available":true}')
        close_producer(producer, 1.0)

    sender = threading.Thread(target=keep_sending)
    try:
        send(broker, (b"i01", b'{"available":true}'), (b"i02", b'{"available":false}'))
        sender.start()
        asyncio.run(process.follower.catch_up(30.0))
        assert process.hides("i02")
    finally:
        is_caught_up.set()
        sender.join()
        process.follower.stop()


def test_a_reader_that_is_behind_says_how_far_and_for_how_long(
    broker: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller retries when the records left are read, not a second later."""
    monkeypatch.setattr("services.items.follower._MAX_RECORDS", 1)
    make_topic(broker)
    process = Process(broker, tmp_path / "none")
    apply = process.items.apply
    monkeypatch.setattr(process.items, "apply", lambda changes: (time.sleep(0.2), apply(changes))[1])
    process.follower.start(30.0)
    try:
        send(broker, *((f"n{number:02}".encode(), b"{}") for number in range(60)))
        with pytest.raises(ReaderBehind) as refused:
            asyncio.run(process.follower.catch_up(1.0))
    finally:
        process.follower.stop()

    stated = re.fullmatch(r"items: (\d+) earlier records are not read yet", refused.value.problem)
    assert stated is not None
    assert 30 < int(stated[1]) <= 60
    assert refused.value.retry_after_s > 2


def test_an_import_awaits_its_reader_as_long_as_it_reads(
    broker: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import waits while the reader makes progress, and gives up when the reader stops."""
    monkeypatch.setattr("services.items.follower._MAX_RECORDS", 1)
    monkeypatch.setattr("pipelines.imports.delivered._STALL_S", 2.0)
    make_topic(broker)
    process, is_free = Process(broker, tmp_path / "none"), threading.Event()
    apply = process.items.apply

    def slowly(changes: list[Change]) -> int:
        """Apply changes, each after a moment."""
        time.sleep(0.2)
        is_free.wait()
        return apply(changes)

    monkeypatch.setattr(process.items, "apply", slowly)
    is_free.set()
    process.follower.start(30.0)
    catalogue = LiveCatalogue(process.items, process.follower.positions.topic_id, process.follower)
    item_ids = [f"n{number:02}" for number in range(20)]
    try:
        send(broker, *((item_id.encode(), b'{"available":false}') for item_id in item_ids))
        catalogue.settle(item_ids, lambda _records: None)
        hidden = [item_id for item_id in item_ids if process.items.hides(item_id)]
        is_free.clear()
        send(broker, *((b"n00", b'{"available":true}') for _ in range(2)))
        with pytest.raises(DependencyUnavailable):
            catalogue.settle(item_ids, lambda _records: None)
    finally:
        is_free.set()
        process.follower.stop()

    assert hidden == item_ids


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_gateway_that_starts_without_broker_and_snapshot_shows_no_hidden_item(
    features: RepoAddress, broker: Server, tmp_path: Path
) -> None:
    """The gateway refuses until the broker is back and the topic was read; then hidden items stay excluded."""
    make_topic(broker)
    await asyncio.to_thread(send, broker, *((f"i{number:02}".encode(), b'{"available":false}') for number in range(10)))
    publish(tmp_path / "bundles", "v1", catalogue_of(), trained=False)
    port = free_port()
    wire = TcpProxy(HOST, port, broker.port)
    settings = Settings(
        state_dir=tmp_path,
        redis_port=features.redis.port,
        kafka_bootstrap=f"{HOST}:{port}",
        topic_partitions=3,
        allowed_hosts="door",
    )
    async with wire:
        await wire.become(Wire.STOP)
        async with open_standby(settings) as (app, _), in_process(app) as http:

            async def ask(path: str = "/v1/recommendations") -> httpx.Response:
                """Ask for readiness, or for a recommendation."""
                return await (http.get(path) if path == "/readyz" else http.post(path, json={"user_id": "u", "k": 10}))

            before = [await ask("/readyz"), await ask()]
            await wire.become(Wire.PASS)
            await until_async(lambda: ask("/readyz"))
            after = await ask()

    assert [(response.status_code, "states of items" in response.text) for response in before] == [(503, True)] * 2
    assert {item["item_id"] for item in after.json()["items"]} == {f"i{number}" for number in range(10, 20)}


async def until_async(ask: Callable[[], Awaitable[httpx.Response]]) -> None:
    """Wait for a good answer."""
    give_up_s = time.monotonic() + 60.0
    while (await ask()).status_code != 200 and time.monotonic() < give_up_s:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
