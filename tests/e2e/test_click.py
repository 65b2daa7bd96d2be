"""A click changes the next answer: `pytest tests/e2e/test_click.py`."""

import time

from services.contracts import recommend_pb2 as pb
from tests.support.stack import Stack, new_user_id, rest_items, rpc_items, with_features
from tests.support.wait import wait_for


def test_a_click_leaves_the_stored_list_behind(stack: Stack) -> None:
    """After a click the stored list is stale: another tier answers, has seen the event, and does not show the item again."""
    user_id = stack.listed_user()
    before = stack.known(user_id)
    clicked = before["items"][0]["item_id"]

    after = stack.sees_click(user_id, clicked)

    assert after["tier"] != "precomputed"
    assert after["newest_event_time_ms"] > before["newest_event_time_ms"]
    assert after["feature_age_ms"] < 20_000
    assert clicked not in rest_items(after)


def test_a_click_over_grpc_is_seen_over_rest(stack: Stack) -> None:
    """The doors share one log and one store."""
    user_id, event_time_ms = new_user_id(), int(time.time() * 1_000)
    event = pb.Interaction(user_id=user_id, item_id="50", event_time_ms=event_time_ms)

    recorded = stack.rpc.RecordEvents(pb.RecordEventsRequest(events=[event]))
    answer = stack.sees(user_id, event_time_ms)

    assert recorded.accepted == 1
    assert "50" not in rest_items(answer)


def test_a_new_user_becomes_known(stack: Stack) -> None:
    """With each click a visitor moves from popularity to the student to the decoder."""
    user_id = new_user_id()
    unknown = stack.known(user_id)
    first = stack.sees_click(user_id, "50")
    for item_id in ("181", "172", "174"):
        stack.sees_click(user_id, item_id)

    def spelled() -> bool:
        return bool(stack.recommend(user_id, deadline_ms=4_000)["tier"] == "llm")

    assert unknown["tier"] == "popular"
    assert first["tier"] == "student"
    wait_for(spelled, what="the decoder's answer")
    asked = pb.RecommendRequest(user_id=user_id, k=10, deadline_ms=4_000)
    shown = with_features(lambda: stack.rpc.Recommend(asked))
    assert not {"50", "181", "172", "174"} & set(rpc_items(shown))


def test_many_events_at_once_and_a_repeat(stack: Stack) -> None:
    """A batch is taken whole; the same event id sent again changes nothing."""
    user_id, now_ms = new_user_id(), int(time.time() * 1_000)
    events = [
        {"user_id": user_id, "item_id": item_id, "event_time_ms": now_ms + place, "event_id": f"{user_id}-{place}"}
        for place, item_id in enumerate(["1", "2", "3"])
    ]

    first = stack.rest.post("/v1/events", json={"events": events})
    stack.sees(user_id, now_ms + 2)
    again = stack.rest.post("/v1/events", json={"events": events})
    answer = stack.sees_click(user_id, "4")

    assert (first.json()["accepted"], again.json()["accepted"]) == (3, 3)
    assert not {"1", "2", "3", "4"} & set(rest_items(answer))
