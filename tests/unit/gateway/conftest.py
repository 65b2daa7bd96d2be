"""A started plane on fakes, and its two doors."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.gateway.grpc.door import RpcDoor
from services.gateway.rest.door import create_rest_app
from tests.unit.gateway.clients import RestClient, RpcClient, rpc_channel
from tests.unit.gateway.world import MAX_BODY_BYTES, VERSION, World, catalogue_of, make_world, publish


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A started plane on fakes with the standard users."""
    root = tmp_path / "bundles"
    publish(root, VERSION, catalogue_of())
    made = make_world(root)
    await made.plane.start()
    yield made
    await made.plane.stop()


@pytest.fixture
async def rest(world: World) -> AsyncIterator[RestClient]:
    """The REST door."""
    app = create_rest_app(lambda: world.plane, lambda: b"# metrics\n", MAX_BODY_BYTES, echoes_request_id=True)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as http:
        yield RestClient(http)


@pytest.fixture
async def rpc(world: World) -> AsyncIterator[RpcClient]:
    """The gRPC door, on a free port."""
    async with rpc_channel(RpcDoor(lambda: world.plane, MAX_BODY_BYTES)) as channel:
        yield RpcClient(channel)


@pytest.fixture(params=["rest", "rpc"])
def door(request: pytest.FixtureRequest) -> RestClient | RpcClient:
    """Each door in turn."""
    client: RestClient | RpcClient = request.getfixturevalue(request.param)
    return client
