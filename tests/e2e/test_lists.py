"""Batches, similar items and popular items on the whole stack."""

import time
from typing import Any

from services.contracts import recommend_pb2 as pb
from tests.support.stacks.stack import Stack, admitted, new_user_id, rest_items, rpc_items
from tests.support.wait import wait_for


def test_lists_of_many_users_items_and_popularity_at_both_doors(stack: Stack) -> None:
    """REST and gRPC answer batches, similar items from the bundle without hidden items, and recent popularity."""
    users = [stack.listed_user(), new_user_id(), new_user_id()]
    hidden = new_user_id()
    entries = [{"user_id": user_id, "k": 5} for user_id in users]

    sent = {"requests": [*entries, {"user_id": users[0], "k": 0}], "deadline_ms": 4_000}
    message = pb.RecommendBatchRequest(requests=[pb.RecommendRequest(**entry) for entry in entries], deadline_ms=4_000)

    def rest_batch() -> Any:
        """Send a batch over REST; None if busy cores read features too late."""
        posted = admitted(
            lambda: stack.rest.post("/v1/recommendations:batch", json=sent, headers={"x-batch-size": "4"})
        )
        answers = posted.json()["answers"]
        return None if "features_unavailable" in [answer.get("reason") for answer in answers] else answers

    def grpc_batch() -> Any:
        """Send a batch over gRPC; None if busy cores read features too late."""
        answers = stack.rpc.RecommendBatch(message).answers
        return None if "features_unavailable" in [answer.recommendation.reason for answer in answers] else answers

    batch = wait_for(rest_batch, what="a batch over REST with the users' features")
    rpc_batch = wait_for(grpc_batch, what="a batch over gRPC with the users' features")
    similar = admitted(lambda: stack.rest.post("/v1/items/50/similar", json={"k": 5, "deadline_ms": 4_000})).json()
    options = pb.RecommendRequest(k=5, user_id=hidden, deadline_ms=4_000)
    cart = pb.SimilarItemsRequest(item_ids=["50", "181"], request=options)

    alone = stack.known(users[0], k=5, deadline_ms=4_000)
    tiers = [alone["tier"], "popular", "popular"]
    assert [answer.get("tier") for answer in batch] == [*tiers, None]
    assert batch[3]["error"]["field"] == "k"
    assert [answer.recommendation.tier for answer in rpc_batch] == tiers
    assert (similar["tier"], len(similar["items"])) == ("similar", 5)
    assert all(item["source"] == "similar" for item in similar["items"])
    before = rpc_items(stack.rpc.SimilarItems(cart))
    stack.rpc.RecordEvents(
        pb.RecordEventsRequest(events=[pb.Interaction(user_id=hidden, item_id=before[0], event_type="hide")])
    )
    wait_for(lambda: before[0] not in rpc_items(stack.rpc.SimilarItems(cart)), what="the hidden item's absence")
    touched = pb.Interaction(user_id=new_user_id(), item_id="1682", event_time_ms=int(time.time() * 1_000))
    stack.rpc.RecordEvents(pb.RecordEventsRequest(events=[touched]))
    popular = pb.PopularRequest(window="1h", request=pb.RecommendRequest(k=50))
    for door, ask in {
        "REST": lambda: rest_items(stack.rest.get("/v1/popular", params={"window": "1h", "k": 50}).json()),
        "gRPC": lambda: rpc_items(stack.rpc.Popular(popular)),
    }.items():  # each gateway reads the counts every few seconds
        wait_for(lambda ask=ask: "1682" in ask(), what=f"what is popular this hour over {door}")
