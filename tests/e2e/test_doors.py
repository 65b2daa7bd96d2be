"""REST and gRPC of the running stack."""

import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from services.contracts import recommend_pb2 as pb
from tests.support.stacks.stack import Stack, new_user_id

AMPLE_MS = 4_000
RECOMMEND = "/v1/recommendations"
PARTS = ("valkey", "broker", "worker", "release", "standby", "serve", "metrics", "edge")


def test_every_tier_can_be_reached(stack: Stack) -> None:
    """The published bundle serves a stored list, the decoder, the student and popularity."""
    known = [stack.known(str(user_id), deadline_ms=AMPLE_MS) for user_id in range(1, 60)]
    one_item = stack.rest.post(RECOMMEND, json={"recent_item_ids": ["50"]}).json()
    nobody = stack.known(new_user_id())

    tiers = {answer["tier"] for answer in known} | {one_item["tier"], nobody["tier"]}
    assert tiers == {"precomputed", "llm", "student", "popular"}
    assert (nobody["tier"], nobody["reason"]) == ("popular", "unknown_user")


def test_a_refusal_over_grpc_keeps_its_details_through_ray(stack: Stack) -> None:
    """The caller gets the status, the structured error and the request ID from the gateway."""
    with pytest.raises(grpc.RpcError) as refused:
        stack.rpc.Recommend(pb.RecommendRequest(user_id="1", k=-1))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert {key for key, _ in refused.value.trailing_metadata()} >= {"grpc-status-details-bin", "x-request-id"}


def test_an_oversized_body_is_refused_through_the_proxies(stack: Stack) -> None:
    """REST and gRPC refuse a body over the limit, and no proxy turns that into a 500."""
    huge = "x" * (stack.settings.max_body_bytes + 1)

    rest = stack.rest.post(RECOMMEND, json={"user_id": huge})
    with pytest.raises(grpc.RpcError) as rpc:
        stack.rpc.Recommend(pb.RecommendRequest(user_id=huge), metadata=(("x-deadline-ms", "5000"),))

    assert rest.status_code == 413, rest.text
    assert rpc.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_health_reflection_and_the_openapi_page(stack: Stack) -> None:
    """REST and gRPC are healthy and describe themselves."""
    health = health_pb2_grpc.HealthStub(stack.channel).Check(health_pb2.HealthCheckRequest())

    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert "tailrace.v1.Recommender" in ProtoReflectionDescriptorDatabase(stack.channel).get_services()
    assert [stack.rest.get(path).status_code for path in ("/healthz", "/readyz")] == [200, 200]
    assert RECOMMEND in stack.rest.get("/openapi.json").json()["paths"]


def test_the_printed_calls_work_when_pasted(stack: Stack) -> None:
    """The commands that `tailrace up` printed return recommendations; without a terminal it does not stop at Ctrl-C."""
    printed = [line for line in stack.output.splitlines() if line.startswith(("curl ", sys.executable))]
    answers = [
        subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60).stdout
        for line in printed
    ]

    assert len(answers) == 2
    assert all("item_id" in answer and "bundle_version" in answer for answer in answers)
    assert "\n`tailrace down` stops everything." in stack.output


def test_status_shows_every_part(stack: Stack) -> None:
    """`tailrace status` names each part, its port and its health, and exits with 0."""
    shown = stack.command("status")

    assert shown.returncode == 0, shown.stdout
    assert [word for word in (*PARTS, str(stack.settings.http_port), "healthy") if word not in shown.stdout] == []
