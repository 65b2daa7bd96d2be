"""The spans of a request by tier, through both doors, and of events: their parents and attributes."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from services.errors import DependencyAway
from services.gateway.grpc.door import RpcDoor
from services.gateway.rest.door import create_rest_app
from tests.support.spans import Recorder, trace_id_of, traceparent
from tests.unit.gateway.clients import RestClient, RpcClient, rpc_channel
from tests.unit.gateway.world import MAX_BODY_BYTES, World

ROOTS = {"rest": "POST /v1/recommendations", "grpc": "tailrace.v1.Recommender/Recommend"}
ALWAYS = {"features", "route", "rank", "answer"}


@pytest.fixture
def recorder() -> Recorder:
    """A recorder that samples every request."""
    return Recorder()


@pytest.fixture
async def traced_rest(world: World, recorder: Recorder) -> AsyncIterator[RestClient]:
    """The REST door, traced."""
    app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, tracing=recorder.tracing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as http:
        yield RestClient(http)


@pytest.fixture
async def traced_rpc(world: World, recorder: Recorder) -> AsyncIterator[RpcClient]:
    """The gRPC door, traced."""
    async with rpc_channel(RpcDoor(lambda: world.plane, MAX_BODY_BYTES, tracing=recorder.tracing)) as channel:
        yield RpcClient(channel)


@pytest.fixture(params=["rest", "rpc"])
def traced_door(request: pytest.FixtureRequest) -> RestClient | RpcClient:
    """Each traced door in turn."""
    client: RestClient | RpcClient = request.getfixturevalue(f"traced_{request.param}")
    return client


@pytest.mark.parametrize(
    ("user_id", "tier", "stages"),
    [
        ("listed", "precomputed", ALWAYS),
        ("long", "llm", ALWAYS | {"llm", "student"}),
        ("short", "student", ALWAYS | {"student"}),
        ("nobody", "popular", ALWAYS),
    ],
)
async def test_each_tier_has_its_tree(
    traced_door: RestClient | RpcClient, recorder: Recorder, user_id: str, tier: str, stages: set[str]
) -> None:
    """The stages are siblings under the request's span, which continues the caller's trace and names the tier."""
    headers = {"traceparent": traceparent(0xFEED)}

    reply = await traced_door.recommend({"user_id": user_id, "k": 3, "request_id": "r1"}, headers)

    root = ROOTS[traced_door.name]
    attributes = recorder.one(root).attributes or {}
    assert reply.body["tier"] == tier
    assert recorder.tree() == {root: None, **dict.fromkeys(stages, root)}
    assert {trace_id_of(span) for span in recorder.spans} == {0xFEED}
    assert recorder.one(root).kind is SpanKind.SERVER
    assert (attributes["tailrace.tier"], attributes["tailrace.request_id"]) == (tier, "r1")
    assert attributes["tailrace.reason"] == reply.body["reason"]
    assert attributes["tailrace.fact.min_history_for_llm"] == 3


async def test_a_refusal_has_a_span_with_its_code(traced_door: RestClient | RpcClient, recorder: Recorder) -> None:
    """A caller's mistake is an attribute, not an error status."""
    await traced_door.recommend({"user_id": "long", "k": 0})

    root = recorder.one(ROOTS[traced_door.name])
    attributes = root.attributes or {}
    assert attributes["error.type"] == "invalid_request"
    assert attributes.get("http.response.status_code", 422) == 422
    assert attributes.get("rpc.response.status_code", "INVALID_ARGUMENT") == "INVALID_ARGUMENT"
    assert root.status.status_code is StatusCode.UNSET


async def test_an_unavailable_dependency_is_an_error(
    world: World, traced_door: RestClient | RpcClient, recorder: Recorder
) -> None:
    """Events that the broker did not acknowledge give the span an error status."""
    world.events.error = DependencyAway("interactions", 1.0)

    await traced_door.record([{"user_id": "u", "item_id": "i"}])

    (root,) = recorder.spans
    assert root.status.status_code is StatusCode.ERROR
    assert (root.attributes or {})["error.type"] == "dependency_away"


async def test_the_page_lists_every_span_and_attribute(
    world: World, traced_door: RestClient | RpcClient, recorder: Recorder
) -> None:
    """Every span and attribute of a request is in docs/traces.md."""
    page = (Path(__file__).parents[4] / "docs" / "traces.md").read_text()
    await traced_door.recommend({"user_id": "long"})
    await traced_door.recommend({"user_id": "long", "k": 0})

    names = {span.name for span in recorder.spans}
    used = {name for span in recorder.spans for name in span.attributes or {} if not name.startswith("tailrace.fact.")}
    spelled = {
        f"`{name}`" if not name.startswith("tailrace.") else f".{name.removeprefix('tailrace.')}`" for name in used
    }
    assert not {name for name in names if f"`{name}`" not in page}
    assert not {words for words in spelled if words not in page}
