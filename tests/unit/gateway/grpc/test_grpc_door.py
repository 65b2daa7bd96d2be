"""gRPC specifics: raw messages, unknown fields by number, health."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.contracts import recommend_pb2 as pb
from services.errors import InvalidRequest
from services.gateway.grpc.items import parse_patch
from services.gateway.grpc.schema import parse_events
from tests.unit.gateway.clients import RpcClient
from tests.unit.gateway.world import World

UNKNOWN = bytes([0xE8, 0x04, 0x01])
"""Field 77, which is in no message."""
REQUEST = pb.RecommendRequest(user_id="u").SerializeToString()
EVENT = pb.Interaction(user_id="u", item_id="i").SerializeToString() + UNKNOWN


@pytest.mark.parametrize(
    ("method", "body", "field"),
    [
        ("Recommend", b"\xff\xff\xff", "body"),
        ("Recommend", b"\x0a\x02\xff\xff", "body"),
        ("Recommend", REQUEST + UNKNOWN, "#77"),
        ("Recommend", REQUEST + b"\x32\x03" + UNKNOWN, "filters.#77"),
        ("Recommend", REQUEST + UNKNOWN * 4_000, "body"),
        ("RecordEvents", b"\x0a" + bytes([len(EVENT)]) + EVENT, "events[0].#77"),
    ],
    ids=["malformed", "bad UTF-8", "unknown field", "unknown field inside", "full of unknown fields", "in an event"],
)
async def test_what_the_schema_does_not_know_is_refused_by_place(
    rpc: RpcClient, world: World, method: str, body: bytes, field: str
) -> None:
    """The door parses raw bytes, so even a malformed message gets our own error."""
    reply = await rpc.call(rpc.channel.unary_unary(f"/tailrace.v1.Recommender/{method}", None, None), body)

    assert (reply.code, reply.field) == ("invalid_request", field)
    assert world.events.records == []


async def test_events_are_counted_before_each_is_read(world: World) -> None:
    """The number of events is checked before parsing: half a million empty events would block the event loop."""
    body = pb.RecordEventsRequest(events=[pb.Interaction()] * 51).SerializeToString() + UNKNOWN
    max_events = world.plane.max_events_per_request

    with pytest.raises(InvalidRequest) as refused:
        parse_events(body, len(body), max_events)

    assert (max_events, refused.value.field, refused.value.problem) == (50, "events", "51 entries")


@pytest.mark.parametrize(
    ("clear", "read"),
    [
        (["attributes", "attributes.x"], {"attributes": None}),
        (["attributes.x", "attributes", "attributes.x"], {"attributes": None}),
        (["attributes.x", "attributes.a.b"], {"attributes": {"x": None, "a.b": None}}),
        (["value", "value"], {"value": None}),
        (["title"], "clear[0]"),
        (["value", "attributes.y"], "clear[1]"),
        (["attributes."], "clear[0]"),
        (["categories.x"], "clear[0]"),
        (["item_id"], "clear[0]"),
        ([""], "clear[0]"),
    ],
)
def test_a_patch_clears_what_it_names(clear: list[str], read: object) -> None:
    """`clear` accepts fields and attributes in any order; unknown fields and changed fields are rejected by index."""
    sets_y = "attributes.y" in clear
    changes = pb.CatalogueItem(
        item_id="i", title="new", attributes={"y": pb.AttributeValue(number=1.0)} if sets_y else {}
    )
    body = pb.PatchItemRequest(changes=changes, clear=clear).SerializeToString()

    if isinstance(read, str):
        with pytest.raises(InvalidRequest) as refused:
            parse_patch(body, len(body))
        assert refused.value.field == read
    else:
        assert parse_patch(body, len(body)) == ("i", {"title": "new", **read})  # type: ignore[dict-item]


async def test_health_of_an_unknown_service_is_not_found(rpc: RpcClient) -> None:
    """The status is NOT_FOUND, as the health protocol requires."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(rpc.channel).Check(health_pb2.HealthCheckRequest(service="other"))

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
