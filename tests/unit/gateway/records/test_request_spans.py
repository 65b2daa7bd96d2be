"""The spans of a request by tier, through both doors, and of events: their parents and attributes."""

from pathlib import Path

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from services.errors import DependencyUnavailable
from services.observability.tracing import Tracing
from tests.support.spans import Recorder, trace_id_of, traceparent
from tests.unit.gateway.clients import Door
from tests.unit.gateway.world import World

ROOTS = {"rest": "POST /v1/recommendations", "grpc": "tailrace.v1.Recommender/Recommend"}
ALWAYS = {"features", "route", "rank", "answer"}


@pytest.fixture
def recorder() -> Recorder:
    """A recorder that samples every request."""
    return Recorder()


@pytest.fixture
def tracing(recorder: Recorder) -> Tracing:
    """Record the doors' spans."""
    return recorder.tracing


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
    door: Door, recorder: Recorder, user_id: str, tier: str, stages: set[str]
) -> None:
    """The stages are siblings under the request's span, which continues the caller's trace and names the tier."""
    headers = {"traceparent": traceparent(0xFEED)}

    reply = await door.recommend({"user_id": user_id, "k": 3, "request_id": "r1"}, headers)

    root = ROOTS[door.name]
    attributes = recorder.one(root).attributes or {}
    assert reply.body["tier"] == tier
    assert recorder.tree() == {root: None, **dict.fromkeys(stages, root)}
    assert {trace_id_of(span) for span in recorder.spans} == {0xFEED}
    assert recorder.one(root).kind is SpanKind.SERVER
    assert (attributes["tailrace.tier"], attributes["tailrace.request_id"]) == (tier, "r1")
    assert attributes["tailrace.reason"] == reply.body["reason"]
    assert attributes["tailrace.fact.min_history_for_llm"] == 3


async def test_only_a_fault_of_ours_is_an_error(world: World, door: Door, recorder: Recorder) -> None:
    """A caller's mistake is an attribute; events that the broker did not acknowledge give the span an error status."""
    world.events.error = DependencyUnavailable("interactions", 1.0)

    await door.recommend({"user_id": "long", "k": 0})
    await door.record([{"user_id": "u", "item_id": "i"}])

    mistake, fault = (span for span in recorder.spans if span.parent is None)
    attributes = mistake.attributes or {}
    assert (mistake.status.status_code, attributes["error.type"]) == (StatusCode.UNSET, "invalid_request")
    assert attributes.get("http.response.status_code", 422) == 422
    assert attributes.get("rpc.response.status_code", "INVALID_ARGUMENT") == "INVALID_ARGUMENT"
    assert (fault.status.status_code, (fault.attributes or {})["error.type"]) == (StatusCode.ERROR, "unavailable")


async def test_the_page_lists_every_span_and_attribute(world: World, door: Door, recorder: Recorder) -> None:
    """Every span and attribute of a request is in docs/traces.md."""
    page = (Path(__file__).parents[4] / "docs" / "traces.md").read_text()
    await door.recommend({"user_id": "long"})
    await door.recommend({"user_id": "long", "k": 0})

    names = {span.name for span in recorder.spans}
    used = {name for span in recorder.spans for name in span.attributes or {} if not name.startswith("tailrace.fact.")}
    spelled = {
        f"`{name}`" if not name.startswith("tailrace.") else f".{name.removeprefix('tailrace.')}`" for name in used
    }
    assert not {name for name in names if f"`{name}`" not in page}
    assert not {words for words in spelled if words not in page}
