"""The spans of a request by tier, through both doors, and of events: their parents and attributes."""

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from services.errors import DependencyUnavailable
from tests.support.spans import Recorder, trace_id_of, traceparent
from tests.unit.gateway.clients import Door
from tests.unit.gateway.world import World

ROOTS = {"rest": "POST /v1/recommendations", "grpc": "tailrace.v1.Recommender/Recommend"}


@pytest.mark.parametrize(
    ("user_id", "tier", "ranked"),
    [
        ("listed", "precomputed", set()),
        ("long", "llm", {"llm", "student"}),
        ("short", "student", {"student"}),
        ("nobody", "popular", set()),
    ],
)
async def test_each_tier_has_its_tree(
    door: Door, recorder: Recorder, user_id: str, tier: str, ranked: set[str]
) -> None:
    """The stages are siblings under the request's span, which continues the caller's trace and names the tier."""
    headers = {"traceparent": traceparent(0xFEED)}

    reply = await door.recommend({"user_id": user_id, "k": 3, "request_id": "r1"}, headers)

    root = recorder.one(ROOTS[door.name])
    stages = {"features", "route", "rank", "answer", *ranked}
    named = {"tier": tier, "request_id": "r1", "reason": reply.body["reason"], "fact.min_history_for_llm": 3}
    assert recorder.tree() == {root.name: None, **dict.fromkeys(stages, root.name)}
    assert {trace_id_of(span) for span in recorder.spans} == {0xFEED}
    assert root.kind is SpanKind.SERVER
    assert {f"tailrace.{name}": value for name, value in named.items()}.items() <= (root.attributes or {}).items()


async def test_only_a_fault_of_ours_is_an_error(world: World, door: Door, recorder: Recorder) -> None:
    """A caller's error is only an attribute; events that the broker did not acknowledge set the error status."""
    world.events.error = DependencyUnavailable("interactions", 1.0)

    await door.recommend({"user_id": "long", "k": 0})
    await door.record([{"user_id": "u", "item_id": "i"}])

    mistake, fault = (span for span in recorder.spans if span.parent is None)
    attributes = mistake.attributes or {}
    assert (mistake.status.status_code, attributes["error.type"]) == (StatusCode.UNSET, "invalid_request")
    assert attributes.get("http.response.status_code", 422) == 422
    assert attributes.get("rpc.response.status_code", "INVALID_ARGUMENT") == "INVALID_ARGUMENT"
    assert (fault.status.status_code, (fault.attributes or {})["error.type"]) == (StatusCode.ERROR, "unavailable")
