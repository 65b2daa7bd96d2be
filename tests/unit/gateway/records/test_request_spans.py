"""The spans of a request, per tier and through both doors, and of events: who hangs under whom, and what they say."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import structlog
from opentelemetry.trace import SpanKind, StatusCode

from services.errors import DependencyAway
from services.gateway.grpc.door import RpcDoor
from services.gateway.rest.door import create_rest_app
from tests.support.spans import Recorder, span_id, trace_id_of, traceparent
from tests.unit.gateway.clients import RestClient, RpcClient, rpc_channel
from tests.unit.gateway.world import MAX_BODY_BYTES, World

ROOTS = {"rest": "POST /v1/recommendations", "grpc": "tailrace.v1.Recommender/Recommend"}
ALWAYS = {"features", "route", "rank", "answer"}


@pytest.fixture
def recorder() -> Recorder:
    """Everything that begins at these doors is sampled."""
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
    """The stages are siblings under the request, which goes on with the caller's trace and says who answered."""
    headers = {"traceparent": traceparent(0xFEED)}

    reply = await traced_door.recommend({"user_id": user_id, "k": 3, "request_id": "r1"}, headers)

    root = ROOTS[traced_door.name]
    said = recorder.one(root).attributes or {}
    assert reply.body["tier"] == tier
    assert recorder.tree() == {root: None, **dict.fromkeys(stages, root)}
    assert {trace_id_of(span) for span in recorder.spans} == {0xFEED}
    assert recorder.one(root).kind is SpanKind.SERVER
    assert (said["tailrace.tier"], said["tailrace.request_id"]) == (tier, "r1")
    assert said["tailrace.reason"] == reply.body["reason"]
    assert said["tailrace.fact.min_history_for_llm"] == 3


async def test_the_llm_is_handed_the_span_that_waits_for_it(
    world: World, traced_rest: RestClient, recorder: Recorder
) -> None:
    """What the replica does hangs under the stage `llm`."""
    await traced_rest.recommend({"user_id": "long"})

    carried = dict(world.llm.requests[0].trace)
    waiting = recorder.one("llm")
    assert carried["traceparent"].startswith(traceparent(trace_id_of(waiting), span_id(waiting))[:-2])
    assert waiting.kind is SpanKind.CLIENT


async def test_untraced_requests_carry_nothing(world: World, rest: RestClient) -> None:
    """Switched off, the question to the LLM is as it was before there were traces."""
    await rest.recommend({"user_id": "long"}, {"traceparent": traceparent()})

    assert world.llm.requests[0].trace == ()


async def test_a_refusal_has_a_span_with_its_code(traced_door: RestClient | RpcClient, recorder: Recorder) -> None:
    """A caller's mistake is noted and is no error of ours."""
    await traced_door.recommend({"user_id": "long", "k": 0})

    root = recorder.one(ROOTS[traced_door.name])
    said = root.attributes or {}
    assert said["error.type"] == "invalid_request"
    assert said.get("http.response.status_code", 422) == 422
    assert said.get("rpc.response.status_code", "INVALID_ARGUMENT") == "INVALID_ARGUMENT"
    assert root.status.status_code is StatusCode.UNSET


async def test_our_fault_is_an_error(world: World, traced_door: RestClient | RpcClient, recorder: Recorder) -> None:
    """Events that the broker does not have make the span an error."""
    world.events.error = DependencyAway("interactions", 1.0)

    await traced_door.record([{"user_id": "u", "item_id": "i"}])

    (root,) = recorder.spans
    assert root.status.status_code is StatusCode.ERROR
    assert (root.attributes or {})["error.type"] == "dependency_away"


async def test_log_lines_of_a_traced_request_name_the_trace(world: World, traced_rest: RestClient) -> None:
    """The one line per request can be found from the trace, and the other way round."""
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        await traced_rest.recommend({"user_id": "short"}, {"traceparent": traceparent(0xC0FFEE)})

    (line,) = [one for one in lines if one["event"] == "recommended"]
    assert line["trace_id"] == f"{0xC0FFEE:032x}"


async def test_the_page_lists_what_spans_say(
    world: World, traced_door: RestClient | RpcClient, recorder: Recorder
) -> None:
    """Every span and attribute of a request is in docs/traces.md."""
    page = (Path(__file__).parents[4] / "docs" / "traces.md").read_text()
    await traced_door.recommend({"user_id": "long"})
    await traced_door.recommend({"user_id": "long", "k": 0})

    names = {span.name for span in recorder.spans}
    said = {name for span in recorder.spans for name in span.attributes or {} if not name.startswith("tailrace.fact.")}
    spelled = {
        f"`{name}`" if not name.startswith("tailrace.") else f".{name.removeprefix('tailrace.')}`" for name in said
    }
    assert not {name for name in names if f"`{name}`" not in page}
    assert not {words for words in spelled if words not in page}


async def test_an_explanation_names_the_trace(world: World, traced_rest: RestClient) -> None:
    """Whoever reads why can go on to the spans."""
    await traced_rest.recommend({"user_id": "short", "request_id": "r9"}, {"traceparent": traceparent(0xC0FFEE)})
    await world.plane.explanations.flush()

    found = await traced_rest.http.get("/v1/explanations/r9")

    assert json.loads(found.content)["trace_id"] == f"{0xC0FFEE:032x}"
