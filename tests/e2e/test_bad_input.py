"""Bad input through the real edge: never a 500, never a stack trace. `pytest tests/e2e/test_bad_input.py`."""

import time
from typing import Any

import grpc
import pytest

from services.contracts import recommend_pb2 as pb
from tests.support.stack import Stack, error_of

DAY_MS = 86_400_000
RECOMMEND = "/v1/recommendations"
EVENTS = "/v1/events"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"user_id": "1", "k": 0}, "k"),
        ({"user_id": "1", "k": -3}, "k"),
        ({"user_id": "1", "k": 10**9}, "k"),
        ({"user_id": "1", "k": "10"}, "k"),
        ({"user_id": ""}, "user_id"),
        ({"user_id": "x" * 10_000}, "user_id"),
        ({"user_id": 7}, "user_id"),
        ({}, "user_id"),
        ({"user_id": "1", "deadline_ms": 0}, "deadline_ms"),
        ({"user_id": "1", "deadline_ms": 3_600_000}, "deadline_ms"),
        ({"user_id": "1", "colour": "red"}, "colour"),
        ({"user_id": "1", "filters": {"allowed_item_ids": ["no-such-item"]}}, "filters.allowed_item_ids"),
        ({"user_id": "1", "filters": {"categories": ["No Such Genre"]}}, "filters.categories"),
        ({"user_id": "1\x00"}, "user_id"),
    ],
)
def test_a_bad_request_names_its_field(stack: Stack, body: dict[str, Any], field: str) -> None:
    """REST answers 422 with the field and the fix."""
    response = stack.rest.post(RECOMMEND, json=body)

    assert response.status_code == 422, response.text
    assert error_of(response)["field"].startswith(field)
    assert "Traceback" not in response.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"user_id": "1"', b"NaN", b"[" * 50_000])
@pytest.mark.parametrize("path", [RECOMMEND, EVENTS])
def test_malformed_json_is_refused(stack: Stack, path: str, content: bytes) -> None:
    """Whatever the bytes, the answer is a 4xx in the envelope."""
    response = stack.rest.post(path, content=content, headers={"content-type": "application/json"})

    assert 400 <= response.status_code < 500, response.text
    assert error_of(response)["message"]
    assert "Traceback" not in response.text


def test_an_oversized_body_is_refused(stack: Stack) -> None:
    """A body over the limit is refused by both doors, and the edge does not turn that into a 500."""
    huge = "x" * (stack.settings.max_body_bytes + 1)

    rest = stack.rest.post(RECOMMEND, json={"user_id": huge})
    with pytest.raises(grpc.RpcError) as rpc:
        stack.rpc.Recommend(pb.RecommendRequest(user_id=huge))

    assert rest.status_code == 413, rest.text
    assert rpc.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.mark.parametrize("method", ["Recommend", "RecordEvents"])
@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"\x0a\xff", b"\x0a\x02\xff\xfe"])
def test_malformed_messages_are_refused(stack: Stack, method: str, content: bytes) -> None:
    """Bytes that are no message end in INVALID_ARGUMENT."""
    call = stack.channel.unary_unary(f"/tailrace.v1.Recommender/{method}", _identity, _identity)

    with pytest.raises(grpc.RpcError) as refused:
        call(content)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.RecommendRequest(), "user_id"),
        (pb.RecommendRequest(user_id="1", k=0), "k"),
        (pb.RecommendRequest(user_id="1", k=10**9), "k"),
        (pb.RecommendRequest(user_id="x" * 10_000), "user_id"),
        (pb.RecommendRequest(user_id="1", deadline_ms=0), "deadline_ms"),
        (pb.RecommendRequest(user_id="1", filters=pb.Filters(allowed_item_ids=["nope"])), "filters.allowed_item_ids"),
    ],
)
def test_a_bad_message_names_its_field(stack: Stack, request_: pb.RecommendRequest, field: str) -> None:
    """gRPC answers INVALID_ARGUMENT with the same words."""
    with pytest.raises(grpc.RpcError) as refused:
        stack.rpc.Recommend(request_)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in refused.value.details()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"event_time_ms": -1}, "event_time_ms"),
        ({"event_time_ms": int(time.time() * 1_000) + DAY_MS}, "event_time_ms"),
        ({"event_time_ms": int(time.time() * 1_000) - 400 * DAY_MS}, "event_time_ms"),
        ({"event_time_ms": "yesterday"}, "event_time_ms"),
        ({"item_id": ""}, "item_id"),
        ({"user_id": "x" * 10_000}, "user_id"),
        ({"price": 3}, "price"),
    ],
)
def test_a_bad_event_names_its_field(stack: Stack, change: dict[str, Any], field: str) -> None:
    """An event that could never be applied is refused before anything is recorded."""
    response = stack.rest.post(EVENTS, json={"user_id": "1", "item_id": "50", **change})

    assert response.status_code == 422, response.text
    assert field in error_of(response)["field"]


def test_paths_and_methods_that_are_not_there(stack: Stack) -> None:
    """A wrong path is 404, a wrong method 405, an unknown RPC UNIMPLEMENTED."""
    missing = stack.rest.get("/v1/nothing")
    wrong = stack.rest.get(RECOMMEND)
    with pytest.raises(grpc.RpcError) as rpc:
        stack.channel.unary_unary("/tailrace.v1.Recommender/Nothing", _identity, _identity)(b"")

    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert rpc.value.code() in {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND}


@pytest.mark.parametrize("deadline", ["-5", "soon", "1e3", "99999999999999999999"])
def test_a_bad_deadline_header_is_refused(stack: Stack, deadline: str) -> None:
    """The header is judged like the field."""
    response = stack.rest.post(RECOMMEND, json={"user_id": "1"}, headers={"x-deadline-ms": deadline})

    assert response.status_code == 422, response.text
    assert "deadline" in error_of(response)["field"]


def test_sensible_answers_at_the_edges(stack: Stack) -> None:
    """More than the catalogue has, everything seen, nothing allowed but the seen: all are answered."""
    everything = stack.recommend("1", k=2_000, exclude_seen=False, deadline_ms=4_000)
    seen_only = stack.rest.post(
        RECOMMEND, json={"recent_item_ids": ["50", "181"], "filters": {"allowed_item_ids": ["50", "181"]}}
    )

    assert len({item["item_id"] for item in everything["items"]}) == len(everything["items"]) > 1_000
    assert seen_only.status_code == 200, seen_only.text


def _identity(content: bytes) -> bytes:
    return content
