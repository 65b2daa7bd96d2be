"""Faults of every part, as callers see them."""

import time
from typing import Any

import grpc
import pytest

from services.contracts import recommend_pb2 as pb
from tests.support.stacks.stack import Stack, error_of, new_user_id, rest_items
from tests.support.wait import wait_for

pytestmark = pytest.mark.usefixtures("healthy")
DEADLINE_MS = 300
MAX_WAIT_MS = 5_000
"""Far longer than busy cores delay an answer, and shorter than a part takes to restart."""


def timed(stack: Stack, **fields: Any) -> tuple[dict[str, Any], float]:
    """Return an answer and the caller's latency in milliseconds."""
    began = time.perf_counter()
    answer = stack.recommend(**fields, deadline_ms=DEADLINE_MS)
    return answer, (time.perf_counter() - began) * 1_000


def test_the_decoder_killed(stack: Stack) -> None:
    """The student answers every request in time, until the decoder is back."""
    seen = ["50", "181", "172", "174"]  # sent with the request, so that only the decoder can fail

    def is_the_decoders() -> bool:
        return bool(stack.recommend(recent_item_ids=seen, deadline_ms=4_000)["tier"] == "llm")

    wait_for(is_the_decoders, 60.0, "the decoder's answer")
    stack.kill_processes(stack.replica_pids(lambda name: name.startswith("llm")))

    answers = [timed(stack, recent_item_ids=seen) for _ in range(30)]

    assert {answer["tier"] for answer, _ in answers} <= {"student", "llm"}
    assert "student" in {answer["tier"] for answer, _ in answers}
    assert max(elapsed_ms for _, elapsed_ms in answers) < MAX_WAIT_MS
    assert all(len(answer["items"]) == 10 for answer, _ in answers)
    wait_for(is_the_decoders, 90.0, "the decoder's return")


def test_the_store_frozen(stack: Stack) -> None:
    """Answers come without features, in time and with the reason; afterwards the features are back."""
    before = stack.known("12")

    with stack.frozen("valkey"):
        answers = [timed(stack, user_id="12") for _ in range(20)]

    assert {answer["reason"] for answer, _ in answers} == {"features_unavailable"}
    assert all(len(answer["items"]) == 10 for answer, _ in answers)
    assert max(elapsed_ms for _, elapsed_ms in answers) < MAX_WAIT_MS
    wait_for(lambda: stack.recommend("12")["newest_event_time_ms"] == before["newest_event_time_ms"])


def test_the_store_killed(stack: Stack) -> None:
    """A killed store restarts with its data, and later clicks are reflected."""
    user_id = new_user_id()
    clicked = stack.sees_click(user_id, "100")

    stack.kill("valkey")
    meanwhile = stack.recommend(user_id)

    assert len(meanwhile["items"]) == 10
    wait_for(lambda: stack.recommend(user_id)["newest_event_time_ms"] == clicked["newest_event_time_ms"])
    assert "101" not in rest_items(stack.sees_click(user_id, "101"))


def test_the_broker_frozen(stack: Stack) -> None:
    """REST and gRPC refuse events with a time to retry; recommendations come in time."""
    with stack.frozen("broker"):
        refused = stack.click(new_user_id(), "50")
        with pytest.raises(grpc.RpcError) as rpc_refused:
            stack.rpc.RecordEvents(pb.RecordEventsRequest(events=[pb.Interaction(user_id="u", item_id="50")]))
        answers = [timed(stack, user_id="13") for _ in range(10)]

    assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
    assert error_of(refused)["code"]
    assert rpc_refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert max(elapsed_ms for _, elapsed_ms in answers) < MAX_WAIT_MS
    stack.until_events_are_accepted()
    stack.sees_click(new_user_id(), "50")
