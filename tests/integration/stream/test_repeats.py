"""Repeated events over REST, gRPC and the client, with a real broker, worker and store."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
import uvicorn

from services.errors import DependencyUnavailable
from services.gateway.data_plane import DataPlane
from services.gateway.events.producer import TopicProducer
from services.gateway.events.record import RecordEvents
from services.gateway.grpc.door import RpcDoor, add_recommender_to_server
from services.gateway.rest.door import create_rest_app
from tailrace_client import AsyncClient, Event
from tests.support.servers import HOST, free_port
from tests.support.stream.stream_rig import TOPIC, Rig, clean_replay
from tests.support.wait import wait_for
from tests.unit.gateway.world import started_world

_MAX_BYTES = 1_048_576


class LateLog:
    """A broker log whose acknowledgements sometimes come too late, so that the gateway refuses recorded events."""

    def __init__(self, producer: TopicProducer) -> None:
        self.num_late = 0
        self._producer = producer

    async def record(self, records: Sequence[tuple[bytes, bytes]]) -> None:
        """Send records."""
        await self._producer.record(records)
        if self.num_late:
            self.num_late -= 1
            raise DependencyUnavailable(TOPIC, 0.05)


@asynccontextmanager
async def clients(plane: DataPlane) -> AsyncIterator[tuple[AsyncClient, AsyncClient]]:
    """Serve a plane over REST and gRPC, and yield the installable client for each."""
    ports = free_port(), free_port()
    app = create_rest_app(lambda: plane, lambda: b"", _MAX_BYTES)
    rest = uvicorn.Server(uvicorn.Config(app, HOST, ports[0], log_level="warning"))
    serving = asyncio.create_task(rest.serve())
    rpc = grpc.aio.server()
    add_recommender_to_server(RpcDoor(lambda: plane, _MAX_BYTES), rpc)
    rpc.add_insecure_port(f"{HOST}:{ports[1]}")
    await rpc.start()
    await asyncio.to_thread(wait_for, lambda: rest.started, what="the REST door")
    async with AsyncClient(f"http://{HOST}:{ports[0]}") as first, AsyncClient(f"grpc://{HOST}:{ports[1]}") as second:
        yield first, second
    rest.should_exit = True
    await serving
    await rpc.stop(None)


async def test_a_request_of_500_events_counts_once_however_often_it_is_sent(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded but refused events that are resent over REST and gRPC count once.

    The client resends them shuffled and in part, before and after a takeover, with 500 events of another caller
    between.
    """
    producer = TopicProducer(rig.settings.kafka_address, TOPIC, 10.0, 8)
    producer.start()
    log = LateLog(producer)
    request, others = ([Event("u", f"{name}{number}") for number in range(500)] for name in "ab")
    await asyncio.to_thread(rig.start_worker)
    async with started_world(tmp_path_factory.mktemp("world")) as world, clients(world.plane) as (rest, rpc):
        monkeypatch.setattr(world.plane, "_record", RecordEvents(log, 500))
        log.num_late = 1
        sent = await rest.record(request)
        await rpc.record(others)
        await asyncio.to_thread(rig.stop_worker)
        log.num_late = 2
        sent_again = await rpc.record(random.Random(0).sample(request, 500))
        await asyncio.to_thread(rig.start_worker)
        await rest.record(request[:65])
        await rest.record(Event("u", "last"))
    await asyncio.to_thread(producer.stop)

    def is_applied() -> bool:
        return "u" in rig.rows("u") and rig.rows("u")["u"].item_ids[-1] == "last"

    await asyncio.to_thread(wait_for, is_applied, 60.0, "the last event")

    assert (sent.num_attempts, sent_again.num_attempts) == (2, 3)
    assert rig.rows("u")["u"].num_events == 1_001
    assert rig.rows("u") == clean_replay(rig.broker)
