"""Metrics of the running stack: `pytest tests/e2e/test_metrics.py`."""

from services.contracts import recommend_pb2 as pb
from tests.support.stack import Stack, new_user_id
from tests.support.wait import wait_for

NUM_REQUESTS = 40


def test_each_request_is_counted_once(stack: Stack) -> None:
    """Whichever replica answers, by either door, the sum over the node grows by exactly the requests made."""
    before = {door: stack.metric("tailrace_requests_total", door=door) for door in ("rest", "grpc")}

    for _ in range(NUM_REQUESTS):
        stack.recommend("1")
        stack.rpc.Recommend(pb.RecommendRequest(user_id="1"))

    for door in ("rest", "grpc"):
        assert stack.metric("tailrace_requests_total", door=door) == before[door] + NUM_REQUESTS
    assert len(stack.replica_pids(lambda name: name.startswith("Gateway"))) == 2


def test_both_endpoints_say_the_same(stack: Stack) -> None:
    """The node's endpoint and the doors' `/metrics` render the same families."""
    text = stack.rest.get("/metrics").text

    for name in ("tailrace_requests_total", "tailrace_stage_seconds_bucket", "tailrace_bundle_info"):
        assert name in text
    assert stack.metric("tailrace_bundle_info") == 1
    assert "vllm:num_requests_running" in text


def test_the_way_of_an_event_is_measured(stack: Stack) -> None:
    """Accepted, applied, visible: each click is counted at each place once."""
    names = ("tailrace_events_total", "tailrace_stream_applied_total", "tailrace_event_to_visible_seconds_count")
    wait_for(lambda: stack.metric("tailrace_stream_lag_events") == 0, what="no lag")
    before = {name: stack.metric(name) for name in names}

    for _ in range(5):
        stack.sees_click(new_user_id(), "50")

    for name in names:
        assert stack.metric(name) == before[name] + 5, name


def test_impressions_are_sent(stack: Stack) -> None:
    """Each answer leaves an impression, and none is lost while all is well."""
    names = ("sent", "failed", "dropped")
    before = {name: stack.metric("tailrace_impressions_total", outcome=name) for name in names}

    for _ in range(10):
        stack.recommend("1")

    wait_for(
        lambda: stack.metric("tailrace_impressions_total", outcome="sent") >= before["sent"] + 10,
        what="ten impressions",
    )
    for name in ("failed", "dropped"):
        assert stack.metric("tailrace_impressions_total", outcome=name) == before[name], name
