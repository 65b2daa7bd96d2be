"""Bad input through the edge and Ray's ingress: one case of each class. The doors' unit tests hold every field."""

import grpc
import pytest

from services.contracts import recommend_pb2 as pb
from tests.support.stack import Stack, error_of

RECOMMEND = "/v1/recommendations"


def _identity(content: bytes) -> bytes:
    return content


def test_a_bad_field_is_named(stack: Stack) -> None:
    """Body and header are refused with 422, gRPC with INVALID_ARGUMENT; the error names the field."""
    bad_body = stack.rest.post(RECOMMEND, json={"user_id": "1", "k": 10**9})
    bad_header = stack.rest.post(RECOMMEND, json={"user_id": "1"}, headers={"x-deadline-ms": "soon"})
    bad_event = stack.rest.post("/v1/events", json={"user_id": "1", "item_id": "50", "event_time_ms": -1})
    with pytest.raises(grpc.RpcError) as bad_message:
        stack.rpc.Recommend(pb.RecommendRequest(user_id="1", k=10**9))

    for response, field in ((bad_body, "k"), (bad_header, "deadline"), (bad_event, "event_time_ms")):
        assert response.status_code == 422, response.text
        assert field in error_of(response)["field"]
    assert bad_message.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "k" in bad_message.value.details()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 50_000])
def test_malformed_json_is_refused(stack: Stack, content: bytes) -> None:
    """Any malformed body gets a 4xx in the error envelope."""
    response = stack.rest.post(RECOMMEND, content=content, headers={"content-type": "application/json"})

    assert 400 <= response.status_code < 500, response.text
    assert error_of(response)["message"]
    assert "Traceback" not in response.text


def test_a_malformed_message_is_refused(stack: Stack) -> None:
    """Bytes that are no protobuf message get INVALID_ARGUMENT."""
    call = stack.channel.unary_unary("/tailrace.v1.Recommender/Recommend", _identity, _identity)

    with pytest.raises(grpc.RpcError) as refused:
        call(b"\x0a\x02\xff\xfe")

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()


def test_an_oversized_body_is_refused(stack: Stack) -> None:
    """Both doors refuse a body over the limit, and no proxy turns that into a 500."""
    huge = "x" * (stack.settings.max_body_bytes + 1)

    rest = stack.rest.post(RECOMMEND, json={"user_id": huge})
    with pytest.raises(grpc.RpcError) as rpc:
        stack.rpc.Recommend(pb.RecommendRequest(user_id=huge))

    assert rest.status_code == 413, rest.text
    assert rpc.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_an_unknown_path_method_or_rpc_is_refused(stack: Stack) -> None:
    """404, 405 and UNIMPLEMENTED."""
    missing = stack.rest.get("/v1/nothing")
    wrong = stack.rest.get(RECOMMEND)
    with pytest.raises(grpc.RpcError) as rpc:
        stack.channel.unary_unary("/tailrace.v1.Recommender/Nothing", _identity, _identity)(b"")

    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert rpc.value.code() in {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND}
