"""What only gRPC has: raw messages, unknown fields by number, health."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.contracts import recommend_pb2 as pb
from tests.unit.gateway.clients import RpcClient
from tests.unit.gateway.world import World


def _with_unknown(message: Any) -> bytes:
    """Append field 77, which no message of ours has."""
    return bytes(message.SerializeToString()) + bytes([0xE8, 0x04, 0x01])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"\xff\xff\xff", "body"),
        (b"\x0a\x02\xff\xff", "body"),
        (_with_unknown(pb.RecommendRequest(user_id="u")), "#77"),
        (pb.RecommendRequest(user_id="u").SerializeToString() + b"\x32\x03" + bytes([0xE8, 0x04, 0x01]), "filters.#77"),
    ],
    ids=["malformed", "bad UTF-8", "unknown field", "unknown field inside"],
)
async def test_what_the_schema_does_not_know_is_refused_by_place(rpc: RpcClient, body: bytes, field: str) -> None:
    """Raw bytes reach the door, so even a malformed message gets our own refusal."""
    reply = await rpc.call(rpc.channel.unary_unary("/tailrace.v1.Recommender/Recommend", None, None), body)

    assert (reply.code, reply.field) == ("invalid_request", field)


async def test_an_unknown_field_in_an_event_is_refused_by_place(rpc: RpcClient, world: World) -> None:
    """The event's place is in the field."""
    event = _with_unknown(pb.Interaction(user_id="u", item_id="i"))
    body = b"\x0a" + bytes([len(event)]) + event

    reply = await rpc.call(rpc.channel.unary_unary("/tailrace.v1.Recommender/RecordEvents", None, None), body)

    assert (reply.code, reply.field) == ("invalid_request", "events[0].#77")
    assert world.events.records == []


async def test_health_of_an_unknown_service_is_not_found(rpc: RpcClient) -> None:
    """The status is NOT_FOUND, as the health protocol requires."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(rpc.channel).Check(health_pb2.HealthCheckRequest(service="other"))

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
