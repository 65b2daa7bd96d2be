"""A click changes the next answer."""

import time

from services.contracts import recommend_pb2 as pb
from tests.support.stacks.stack import Stack, new_user_id, rest_items, rpc_items, with_features
from tests.support.wait import wait_for


def test_after_a_click_the_stored_list_is_not_used(stack: Stack) -> None:
    """Another tier answers, reflects the event, and does not recommend the clicked item again."""
    user_id = stack.listed_user()
    before = stack.known(user_id)
    clicked = before["items"][0]["item_id"]

    after = stack.sees_click(user_id, clicked)

    assert after["tier"] != "precomputed"
    assert after["newest_event_time_ms"] > before["newest_event_time_ms"]
    assert 0 <= after["feature_age_ms"] < 60_000
    assert clicked not in rest_items(after)


def test_a_click_over_grpc_is_seen_over_rest(stack: Stack) -> None:
    """REST and gRPC share one log and one store."""
    user_id, event_time_ms = new_user_id(), int(time.time() * 1_000)
    event = pb.Interaction(user_id=user_id, item_id="50", event_time_ms=event_time_ms)

    recorded = stack.rpc.RecordEvents(pb.RecordEventsRequest(events=[event]))
    answer = stack.sees(user_id, event_time_ms)

    assert recorded.accepted == 1
    assert "50" not in rest_items(answer)


def test_a_new_user_becomes_known(stack: Stack) -> None:
    """With each click a visitor moves from popularity to the student to the decoder."""
    user_id, clicked = new_user_id(), ["50", "181", "172", "174"]
    unknown = stack.known(user_id)
    first, *_ = [stack.sees_click(user_id, item_id) for item_id in clicked]

    assert (unknown["tier"], first["tier"]) == ("popular", "student")
    wait_for(lambda: stack.recommend(user_id, deadline_ms=4_000)["tier"] == "llm", what="the decoder's answer")
    request = pb.RecommendRequest(user_id=user_id, k=10, deadline_ms=4_000)
    assert not set(clicked) & set(rpc_items(with_features(lambda: stack.rpc.Recommend(request))))
