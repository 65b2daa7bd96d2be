"""The stack of containers: what restarts and kills leave, text, keys, and what it writes to its standard output."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine.checkpoints import write_checkpoint
from tests.support.stacks.compose_stack import SERVICES, ComposeStack
from tests.support.stacks.stack import Stack, new_user_id, rest_items
from tests.support.wait import wait_for

TEXT = {"model": "tiny", "messages": [{"role": "user", "content": "the river runs on"}], "max_tokens": 8}
CLICKED = tuple(str(number) for number in range(1, 21))
DURABLE = ("redis", "worker", "serve", "standby", "edge")


@pytest.fixture
def composed(stack: Stack) -> Iterator[ComposeStack]:
    """The shared stack, when it is one of containers."""
    if not isinstance(stack, ComposeStack):
        pytest.skip("needs a stack of containers: make test-compose")
    stack.until_healthy()
    yield stack
    stack.until_healthy()


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


@pytest.mark.parametrize("part", ["serve", "standby", "edge"])
def test_a_killed_door_opens_again_and_no_event_is_lost(composed: ComposeStack, part: str) -> None:
    """While Ray's container is away the standby answers, and Ray without the standby; only the edge closes the doors, until it is back."""
    user_id = new_user_id()
    last_ms = record(composed, user_id)

    composed.kill(part)
    if part == "edge":
        composed.until_healthy()
    answer = composed.recommend("1")

    assert answer["items"]
    assert composed.sees(user_id, last_ms, timeout_s=60.0)["newest_event_time_ms"] == last_ms


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
    containers = [composed.container(service) for service in SERVICES.values()]
    version = composed.recommend("1")["bundle_version"]

    composed.compose("up", "--detach", timeout_s=300.0)

    assert [composed.container(service) for service in SERVICES.values()] == containers
    assert composed.recommend("1")["bundle_version"] == version


def test_a_call_without_a_key_is_refused(composed: ComposeStack) -> None:
    """The doors of containers require keys, since they do not listen on loopback."""
    answer = composed.rest.post("/v1/recommendations", json={"user_id": "1"}, headers={"authorization": "Bearer none"})

    assert answer.status_code == 401


def test_text_is_served_with_a_checkpoint(composed: ComposeStack, tmp_path: Path) -> None:
    """With TEXT_PATH the doors generate text, without it they answer 404; recommendations work in both cases."""
    composed.put(write_checkpoint(tmp_path / "tiny", max_positions=256), "/state")

    without = composed.rest.post("/v1/chat/completions", json=TEXT)
    with composed.given(TEXT_PATH="/state/tiny"):
        written = composed.rest.post("/v1/chat/completions", json=TEXT)
        recommended = composed.recommend("1")

    assert without.status_code == 404
    assert written.status_code == 200, written.text
    assert 0 < written.json()["usage"]["completion_tokens"] <= TEXT["max_tokens"]
    assert recommended["items"]


def test_a_stopped_container_leaves_its_last_words(composed: ComposeStack) -> None:
    """`docker logs` has a gateway's last request and the line of its SIGTERM, of serve and standby alike."""
    request_id = str(composed.recommend("1")["request_id"])

    composed.restart("serve", "standby")

    assert [line["event"] for line in composed.log_lines(request_id=request_id)] == ["recommended"]
    for part in ("serve", "standby"):
        wait_for(lambda part=part: composed.log_lines(part=part, event="stopping"), 5.0, f"the last words of {part}")
