"""Both doors of the running stack: `pytest tests/e2e/test_doors.py`."""

import subprocess
import sys

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from services.contracts import recommend_pb2 as pb
from tests.support.stack import Stack, new_user_id, rest_items, rpc_items, with_features

AMPLE_MS = 4_000


@pytest.mark.parametrize("user_id", ["1", "196", "405", "943"])
def test_both_doors_give_the_same_answer(stack: Stack, user_id: str) -> None:
    """One data plane: items, order, tier and bundle do not depend on the door."""
    rest = stack.known(user_id, k=10, deadline_ms=AMPLE_MS)
    asked = pb.RecommendRequest(user_id=user_id, k=10, deadline_ms=AMPLE_MS)
    rpc = with_features(lambda: stack.rpc.Recommend(asked))

    assert len(rest["items"]) == 10
    assert rpc_items(rpc) == rest_items(rest)
    assert (rpc.tier, rpc.bundle_version) == (rest["tier"], rest["bundle_version"])
    assert rpc.newest_event_time_ms == rest["newest_event_time_ms"]
    assert [item.title for item in rpc.items] == [item["title"] for item in rest["items"]]


def test_an_answer_says_who_made_it_and_in_which_time(stack: Stack) -> None:
    """Tier, reason, bundle, freshness and stages are in every answer, and the items differ."""
    answer = stack.known("196", k=20, deadline_ms=AMPLE_MS, request_id="my-request")

    assert answer["request_id"] == "my-request"
    assert answer["tier"] in {"precomputed", "llm", "student"}
    assert answer["reason"]
    assert answer["bundle_version"] == stack.rest.get("/v1/bundle").json()["version"]
    assert answer["newest_event_time_ms"] > 0
    assert set(answer["stages_ms"]) >= {"features", "rank"}
    assert len(set(rest_items(answer))) == 20


def test_every_tier_can_be_reached(stack: Stack) -> None:
    """Stored list, decoder, student and popularity each answer what they are for."""
    known = [stack.known(str(user_id), deadline_ms=AMPLE_MS) for user_id in range(1, 60)]
    one_item = stack.rest.post("/v1/recommendations", json={"recent_item_ids": ["50"]}).json()
    nobody = stack.known(new_user_id())

    tiers = {answer["tier"] for answer in known} | {one_item["tier"], nobody["tier"]}
    assert tiers == {"precomputed", "llm", "student", "popular"}
    assert (nobody["tier"], nobody["reason"]) == ("popular", "unknown_user")


def test_filters_and_exclusions_hold(stack: Stack) -> None:
    """Only what is asked for is shown, by either door."""
    excluded = rest_items(stack.recommend("7", k=5, deadline_ms=AMPLE_MS))
    without = stack.recommend("7", k=5, exclude_item_ids=excluded, deadline_ms=AMPLE_MS)
    allowed = ["1", "50", "100", "181", "258"]
    only = stack.rpc.Recommend(
        pb.RecommendRequest(
            recent_item_ids=["56", "98", "127"], k=5, filters=pb.Filters(allowed_item_ids=allowed), deadline_ms=AMPLE_MS
        )
    )

    assert not set(excluded) & set(rest_items(without))
    assert set(rpc_items(only)) == set(allowed)


def test_health_reflection_and_the_openapi_page(stack: Stack) -> None:
    """The doors describe themselves and say that they are well."""
    health = health_pb2_grpc.HealthStub(stack.channel).Check(health_pb2.HealthCheckRequest())
    services = ProtoReflectionDescriptorDatabase(stack.channel).get_services()

    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert "tailrace.v1.Recommender" in services
    assert stack.rest.get("/healthz").status_code == 200
    assert stack.rest.get("/readyz").status_code == 200
    assert "/v1/recommendations" in stack.rest.get("/openapi.json").json()["paths"]


def test_the_printed_calls_work_when_pasted(stack: Stack) -> None:
    """The curl line and the Python line that `tailrace up` printed give recommendations."""
    printed = [line for line in stack.words.splitlines() if line.startswith(("curl ", sys.executable))]
    answers = [
        subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60).stdout
        for line in printed
    ]

    assert len(answers) == 2
    assert all("item_id" in answer and "bundle_version" in answer for answer in answers)


def test_status_shows_every_part(stack: Stack) -> None:
    """`tailrace status` names each part, its port and its health, and exits with 0."""
    shown = stack.command("status")

    assert shown.returncode == 0, shown.stdout
    for word in (
        "valkey",
        "broker",
        "worker",
        "standby",
        "serve",
        "metrics",
        "edge",
        str(stack.settings.http_port),
        "healthy",
    ):
        assert word in shown.stdout
