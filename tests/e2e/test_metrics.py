"""Metrics of the running stack."""

import re

from services.contracts import recommend_pb2 as pb
from tests.support.stacks.stack import Stack, new_user_id
from tests.support.wait import wait_for

NUM_REQUESTS = 40


def test_each_request_is_counted_once_and_leaves_an_impression(stack: Stack) -> None:
    """Every request counts once and writes one impression, regardless of the replica and the protocol."""
    before = {door: stack.metric("tailrace_requests_total", door=door, code="ok") for door in ("rest", "grpc")}
    outcomes = {
        name: stack.metric("tailrace_impressions_total", outcome=name) for name in ("sent", "failed", "dropped")
    }

    for _ in range(NUM_REQUESTS):
        stack.recommend("1")
        stack.rpc.Recommend(pb.RecommendRequest(user_id="1"))

    def counts() -> dict[str, float]:
        return {door: stack.metric("tailrace_requests_total", door=door, code="ok") for door in before}

    after = {door: count + NUM_REQUESTS for door, count in before.items()}
    wait_for(lambda: all(count >= after[door] for door, count in counts().items()), what="the counts")
    assert counts() == after
    assert len(stack.replica_pids(lambda name: name.startswith("Gateway"))) == 2
    sent = outcomes.pop("sent") + 2 * NUM_REQUESTS
    wait_for(lambda: stack.metric("tailrace_impressions_total", outcome="sent") >= sent, what="the impressions")
    for name, count in outcomes.items():
        assert stack.metric("tailrace_impressions_total", outcome=name) == count, name


def test_the_doors_serve_the_metrics_of_the_whole_node(stack: Stack) -> None:
    """`/metrics` over REST has the families of gateways and engine, like the node's endpoint."""
    # an engine has counts after its first request
    stack.recommend(recent_item_ids=["50", "181", "172", "174"], deadline_ms=4_000)
    names = ("tailrace_requests_total", "tailrace_stage_seconds_bucket", "vllm:num_requests_running")
    text = wait_for(
        lambda: shown if all(name in (shown := stack.rest.get("/metrics").text) for name in names) else None,
        what=f"the metrics {names}",
    )

    assert len(re.findall(r"^tailrace_bundle_info\{.*\} 1\.0$", text, re.MULTILINE)) == 1


def test_each_event_is_counted_once_at_each_place(stack: Stack) -> None:
    """Accepted, applied, visible."""
    names = ("tailrace_events_total", "tailrace_stream_applied_total", "tailrace_event_to_visible_seconds_count")
    wait_for(lambda: stack.metric("tailrace_stream_lag_events") == 0, what="no lag")
    before = {name: stack.metric(name) for name in names}

    for _ in range(5):
        stack.sees_click(new_user_id(), "50")

    # the worker counts an event after writing the row, which an answer may have read by then
    wait_for(lambda: all(stack.metric(name) >= before[name] + 5 for name in names), what="the counts")
    for name in names:
        assert stack.metric(name) == before[name] + 5, name
