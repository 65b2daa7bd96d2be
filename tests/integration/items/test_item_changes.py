"""Two gateways change an item at the same time, with a real broker: no acknowledged change is reverted.

Run: pytest tests/integration/items/test_item_changes.py
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.contracts.items import decode_item
from services.errors import NotFound
from services.gateway.events.items import ItemOperations
from services.gateway.events.producer import TopicProducer
from services.items.follower import ItemFollower
from services.items.live_items import LiveItems
from services.settings.addresses import KafkaAddress
from services.settings.kafka_topics import Topic
from tests.support.servers import Server
from tests.support.stream.topics import read_topic
from tests.support.wait import until
from tests.unit.gateway.world import catalogue_of

TOPIC = Topic(name="items", num_partitions=1, keep_ms=None)


class HeldProducer(TopicProducer):
    """A producer whose records wait for `gate`; `is_held` while one waits."""

    gate: asyncio.Event
    is_held = False

    async def record(self, *sent: Any, **options: Any) -> Any:
        """Send records once the gate is open."""
        self.is_held = not self.gate.is_set()
        await self.gate.wait()
        return await super().record(*sent, **options)


class Gateway:
    """The operations of a gateway, with its own follower and producer."""

    def __init__(self, broker: Server, snapshot: Path) -> None:
        kafka = KafkaAddress(bootstrap=broker.address)
        self.items = LiveItems()
        self.items.lay(catalogue_of(8))
        self.follower = ItemFollower(self.items, kafka, TOPIC.name, snapshot, makes=TOPIC)
        self.producer = HeldProducer(kafka, TOPIC.name, 5.0, 100)
        self.producer.gate = asyncio.Event()
        self.producer.gate.set()
        self.operations = ItemOperations(self.producer, self.follower, self.items, no_names)

    async def state(self, item_id: str) -> tuple[bool, str | None, float | None] | None:
        """Whether the item is available, its title and value, once all records are applied; None if it is deleted."""
        await self.follower.catch_up(10.0)
        state = self.items.find(lambda layout: layout.state(item_id))
        return None if state is None else (state.available, state.title, state.value)


async def no_names(_tenant: str, _timeout_s: float) -> AsyncIterator[None]:
    """All names are loaded."""
    return
    yield


@asynccontextmanager
async def gateways(broker: Server, folder: Path) -> AsyncIterator[Sequence[Gateway]]:
    """Three started gateways without a snapshot."""
    started = [Gateway(broker, folder / f"{number}") for number in range(3)]
    for gateway in started:
        await asyncio.to_thread(gateway.follower.start, 30.0)
        gateway.producer.start()
    try:
        yield started
    finally:
        for gateway in started:
            await asyncio.to_thread(gateway.follower.stop)
            await asyncio.to_thread(gateway.producer.stop)


async def held_patch(gateway: Gateway, item_id: str, **changes: object) -> "asyncio.Task[Any]":
    """A PATCH that has read the item, and whose record waits."""
    gateway.producer.gate.clear()
    patch = asyncio.create_task(gateway.operations.patch(item_id, changes))
    await until(lambda: gateway.producer.is_held)
    return patch


async def test_a_patch_keeps_what_was_acknowledged_since_it_read_the_item(broker: Server, tmp_path: Path) -> None:
    """A PUT between read and record stays, at every process and in the topic's last record."""
    async with gateways(broker, tmp_path) as (first, second, third):
        patch = await held_patch(first, "i01", value=2.0)
        await second.operations.put_one("i01", {"available": False, "title": "Hidden"})
        first.producer.gate.set()
        patched = await patch
        states = [await gateway.state("i01") for gateway in (first, second, third)]
        *_, last = [record for _, record in await asyncio.to_thread(read_topic, broker, TOPIC.name)]
        _, in_topic = decode_item(last.key, last.value)

    assert states == [(False, "Hidden", 2.0)] * 3
    assert in_topic == patched
    assert (patched.available, patched.title, patched.value) == states[0]


async def test_patches_of_other_fields_at_two_gateways_all_apply(broker: Server, tmp_path: Path) -> None:
    """Two PATCHes that read the same state change both of their fields."""
    async with gateways(broker, tmp_path) as (first, second, third):
        patches = [await held_patch(first, "i01", available=False), await held_patch(second, "i01", value=2.0)]
        for gateway in (first, second):
            gateway.producer.gate.set()
        await asyncio.gather(*patches)
        states = [await gateway.state("i01") for gateway in (first, second, third)]

    assert states == [(False, None, 2.0)] * 3


async def test_a_patch_does_not_bring_back_a_deleted_item(broker: Server, tmp_path: Path) -> None:
    """A DELETE between read and record stays, and the PATCH finds no item."""
    async with gateways(broker, tmp_path) as (first, second, third):
        patch = await held_patch(first, "i01", value=2.0)
        await second.operations.delete(["i01"])
        first.producer.gate.set()
        with pytest.raises(NotFound):
            await patch
        states = [await gateway.state("i01") for gateway in (first, second, third)]
        *_, last = [record for _, record in await asyncio.to_thread(read_topic, broker, TOPIC.name)]

    assert states == [None] * 3
    assert last.value is None
