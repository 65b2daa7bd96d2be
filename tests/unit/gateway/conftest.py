"""A started plane on fakes, and its two doors."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2_grpc

from services.gateway.rest import create_rest_app
from services.gateway.rpc import RpcDoor, add_recommender_to_server
from tests.unit.gateway.clients import RestClient, RpcClient
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
    server = grpc.aio.server()
    door = RpcDoor(lambda: world.plane, MAX_BODY_BYTES)
    add_recommender_to_server(door, server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(door), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield RpcClient(channel)
    await server.stop(None)


class _Health(health_pb2_grpc.HealthServicer):
    """Only Check, as under Ray Serve."""

    def __init__(self, door: RpcDoor) -> None:
        self.Check = door.Check


@pytest.fixture(params=["rest", "rpc"])
def door(request: pytest.FixtureRequest) -> RestClient | RpcClient:
    """Each door in turn."""
    client: RestClient | RpcClient = request.getfixturevalue(request.param)
    return client
