"""Durability of the compose stack."""

import time

import pytest

from tests.support.stacks.compose_stack import ComposeStack
from tests.support.stacks.stack import new_user_id, rest_items

CLICKED = tuple(str(number) for number in range(1, 21))
DURABLE = ("redis", "worker", "serve", "standby", "edge")


def record(stack: ComposeStack, user_id: str) -> int:
    """Record twenty clicks, all acknowledged; return the time of the last."""
    now_ms = int(time.time() * 1_000)
    events = [
        {"user_id": user_id, "item_id": item_id, "event_time_ms": now_ms + place}
        for place, item_id in enumerate(CLICKED)
    ]
    accepted = stack.rest.post("/v1/events", json={"events": events})
    assert accepted.json()["accepted"] == len(CLICKED), accepted.text
    return now_ms + len(CLICKED) - 1


def test_a_restart_loses_no_event_and_no_feature(composed: ComposeStack) -> None:
    """Events acknowledged right before store, worker and doors restart are applied; features are kept."""
    known = composed.recommend("1")
    user_id = new_user_id()
    last_ms = record(composed, user_id)

    composed.restart(*DURABLE)
    answer = composed.sees(user_id, last_ms, timeout_s=60.0)
    everything = composed.recommend(user_id, k=1_000, deadline_ms=4_000)

    assert answer["newest_event_time_ms"] == last_ms
    assert not set(CLICKED) & set(rest_items(everything)), "what was clicked is seen, so none of it is shown"
    assert composed.recommend("1")["newest_event_time_ms"] == known["newest_event_time_ms"]


def test_a_killed_worker_loses_no_event(composed: ComposeStack) -> None:
    """Events acknowledged right before the worker's SIGKILL are all applied by the next one."""
    user_id = new_user_id()
    last_ms = record(composed, user_id)

    composed.kill("worker")
    composed.sees(user_id, last_ms, timeout_s=60.0)

    assert not set(CLICKED) & set(rest_items(composed.recommend(user_id, k=1_000, deadline_ms=4_000)))


def test_a_restart_of_the_broker_loses_no_event(composed: ComposeStack) -> None:
    """Events acknowledged while the worker is paused survive the broker's restart on disk."""
    if not composed.keeps_events():
        pytest.skip("the broker is a stand-in that keeps nothing on disk; run with Apache Kafka's image")
    user_id = new_user_id()
    with composed.frozen("worker"):
        last_ms = record(composed, user_id)
        composed.compose("restart", "kafka", timeout_s=120.0)
    composed.sees(user_id, last_ms, timeout_s=120.0)

    assert not set(CLICKED) & set(rest_items(composed.recommend(user_id, k=1_000, deadline_ms=4_000)))


def test_a_second_up_changes_nothing(composed: ComposeStack) -> None:
    """One-shot jobs change nothing when they run again: the same key, bundle and containers."""
    services = ("redis", "kafka", "worker", "serve", "standby", "edge")
    containers = [composed.container(service) for service in services]
    version = composed.recommend("1")["bundle_version"]

    composed.compose("up", "--detach", timeout_s=300.0)

    assert [composed.container(service) for service in services] == containers
    assert composed.recommend("1")["bundle_version"] == version


def test_a_call_without_a_key_is_refused(composed: ComposeStack) -> None:
    """The doors of containers require keys, since they do not listen on loopback."""
    answer = composed.rest.post("/v1/recommendations", json={"user_id": "1"}, headers={"authorization": "Bearer none"})

    assert answer.status_code == 401
