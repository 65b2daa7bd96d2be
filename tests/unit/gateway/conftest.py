"""A started request path on fakes, and its two doors."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.call.guard import Access
from services.gateway.grpc.door import RpcDoor
from services.gateway.rest.door import create_rest_app
from services.observability.tracing import Tracing
from tests.support.clock import Clock
from tests.support.engine.parrot import Parrot
from tests.support.spans import Recorder
from tests.unit.gateway.clients import Door, RestClient, RpcClient, in_process, rpc_channel
from tests.unit.gateway.world import MAX_BODY_BYTES, World, started_world


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture
async def world(tmp_path: Path, parrot: Parrot) -> AsyncIterator[World]:
    """A started request path on fakes with the standard users and the fake text model."""
    async with started_world(tmp_path, parrot) as made:
        yield made


@pytest.fixture
def access() -> Access | None:
    return None


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tracing(request: pytest.FixtureRequest) -> Tracing | None:
    """The recorder's tracing if the test has a recorder, else None."""
    if "recorder" not in request.fixturenames:
        return None
    recorder: Recorder = request.getfixturevalue("recorder")
    return recorder.tracing


@pytest.fixture
async def rest(world: World, access: Access | None, tracing: Tracing | None) -> AsyncIterator[RestClient]:
    """The REST door."""
    app = create_rest_app(
        lambda: world.plane,
        lambda: b"# metrics\n",
        MAX_BODY_BYTES,
        access=access,
        tracing=tracing,
        echoes_request_id=True,
    )
    async with in_process(app) as http:
        yield RestClient(http)


@pytest.fixture
async def rpc(world: World, access: Access | None, tracing: Tracing | None) -> AsyncIterator[RpcClient]:
    async with rpc_channel(RpcDoor(lambda: world.plane, MAX_BODY_BYTES, access, tracing)) as channel:
        yield RpcClient(channel)


@pytest.fixture(params=["rest", "rpc"])
def door(request: pytest.FixtureRequest) -> Door:
    """Each door in turn."""
    client: Door = request.getfixturevalue(request.param)
    return client
