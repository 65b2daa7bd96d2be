"""A hidden item disappears from every answer (REST, gRPC, gateways, standby, stored lists), also through faults."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from services.contracts import recommend_pb2 as pb
from tests.support.stacks.compose_stack import ComposeStack
from tests.support.stacks.stack import Stack, admitted, rest_items, rpc_items
from tests.support.wait import wait_for

NUM_ASKED = 12
"""Consecutive requests, enough to reach each gateway."""


@pytest.fixture
def standby(stack: Stack) -> Iterator[httpx.Client]:
    """The standby's REST port, bypassing the edge."""
    with stack.standby() as client:
        yield client


def places(stack: Stack, standby: httpx.Client, user_id: str) -> dict[str, Callable[[], list[str]]]:
    """The answers to this user, by gateway."""
    body = {"user_id": user_id, "k": 50, "deadline_ms": 4_000}
    message = pb.RecommendRequest(user_id=user_id, k=50, deadline_ms=4_000)
    return {
        "rest": lambda: rest_items(stack.recommend(user_id, k=50, deadline_ms=4_000)),
        "grpc": lambda: rpc_items(stack.rpc.Recommend(message)),
        "standby": lambda: rest_items(admitted(lambda: standby.post("/v1/recommendations", json=body)).json()),
    }


def until_gone(asked: dict[str, Callable[[], list[str]]], item_id: str) -> None:
    for door, ask in asked.items():
        what = f"answers without it at {door}"
        wait_for(lambda ask=ask: not any(item_id in ask() for _ in range(NUM_ASKED)), 10.0, what)


def put(stack: Stack, item_id: str, **fields: object) -> httpx.Response:
    """Put an item over REST."""
    response = admitted(lambda: stack.rest.put(f"/v1/items/{item_id}", json=fields))
    assert response.status_code == 200, response.text
    return response


def test_a_hidden_item_leaves_every_answer_and_comes_back(stack: Stack, standby: httpx.Client) -> None:
    """An item of a stored list is hidden over REST and shown again over gRPC; lists stay in use meanwhile."""
    user_id = stack.listed_user()
    first = rest_items(stack.known(user_id))[0]
    put(stack, first, available=False)
    try:
        until_gone(places(stack, standby, user_id), first)
        assert stack.known(user_id)["tier"] == "precomputed"
    finally:
        stack.rpc.PutItems(pb.PutItemsRequest(items=[pb.CatalogueItem(item_id=first, available=True)]))

    for door, ask in places(stack, standby, user_id).items():
        wait_for(lambda ask=ask: first in ask(), 10.0, f"an answer with it at {door}")


def test_a_new_item_is_found_by_its_category(stack: Stack) -> None:
    """An item that no bundle has appears in answers filtered by its category, and disappears when deleted."""
    put(stack, "never-trained", title="Never trained", categories=["unheard-of"])
    filters = {"categories": ["unheard-of"]}

    def found() -> list[dict[str, str]]:
        response = stack.rest.post(
            "/v1/recommendations", json={"user_id": "1", "filters": filters, "deadline_ms": 4_000}
        )
        return response.json()["items"] if response.status_code == 200 else []

    item = wait_for(found, 10.0, "the new item")[0]
    assert (item["item_id"], item["title"], item["source"]) == ("never-trained", "Never trained", "popular")
    assert stack.rest.delete("/v1/items/never-trained").status_code == 200
    wait_for(lambda: not found(), 10.0, "its end")
    assert wait_for(lambda: stack.rest.get("/v1/items/never-trained").status_code == 404, 10.0, "404")


@pytest.mark.parametrize(
    "part", ["broker", *(pytest.param(part, marks=pytest.mark.grid) for part in ("valkey", "worker"))]
)  # tests/integration/items holds gateways apart from the store and the worker
def test_what_is_hidden_stays_hidden_through_a_fault(stack: Stack, standby: httpx.Client, part: str) -> None:
    """A hidden item stays hidden while store, broker or worker fail, and can be shown again afterwards."""
    if part == "broker" and isinstance(stack, ComposeStack) and not stack.keeps_events():
        pytest.skip("the broker is a stand-in that keeps nothing on disk; run with Apache Kafka's image")
    user_id = stack.listed_user()
    item_id = rest_items(stack.known(user_id))[1]
    put(stack, item_id, available=False)
    try:
        asked = places(stack, standby, user_id)
        until_gone(asked, item_id)
        stack.kill(part)
        assert not any(item_id in ask() for ask in asked.values() for _ in range(NUM_ASKED))
        stack.until_healthy()
        assert not any(item_id in ask() for ask in asked.values() for _ in range(NUM_ASKED))
    finally:
        wait_for(lambda: stack.rest.put(f"/v1/items/{item_id}", json={}).status_code == 200, 60.0, "the item put again")

    wait_for(lambda: item_id in asked["rest"](), 10.0, "an answer with it")
    stack.until_events_are_accepted()
