"""The standby's gRPC server around the gateway's door: what callers must not notice. No HAProxy, no ports."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from infra.local.standby.doors import rpc_server
from services.gateway.grpc.door import RpcDoor
from tests.unit.gateway.clients import RpcClient
from tests.unit.gateway.world import MAX_BODY_BYTES, VERSION, catalogue_of, make_world, publish


@pytest.fixture
async def rpc(tmp_path: Path) -> AsyncIterator[RpcClient]:
    """A caller of the standby's server, over its Unix socket."""
    publish(tmp_path / "bundles", VERSION, catalogue_of())
    world = make_world(tmp_path / "bundles")
    await world.plane.start()
    server = rpc_server(RpcDoor(lambda: world.plane, MAX_BODY_BYTES), tmp_path / "rpc.sock")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'rpc.sock'}") as channel:
        yield RpcClient(channel)
    await server.stop(None)
    await world.plane.stop()


@pytest.mark.parametrize("num_bytes", [MAX_BODY_BYTES + 1, 5_000_000])
async def test_what_is_too_large_is_refused_in_the_doors_words(rpc: RpcClient, num_bytes: int) -> None:
    """Not by grpc's own limit of 4 MB, whose RESOURCE_EXHAUSTED clients repeat."""
    reply = await rpc.recommend({"user_id": "u" * num_bytes})

    assert (reply.code, reply.field) == ("request_too_large", "body")
