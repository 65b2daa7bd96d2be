"""The container stack: effects of restarts and kills, the log, text, keys, and the surfaces folder."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.contracts import recommend_pb2 as pb
from services.contracts.experiments import read_experiments
from tests.support.engine.checkpoints import write_checkpoint
from tests.support.gateway.keys import bearer
from tests.support.stacks.compose_stack import SERVICES, ComposeStack
from tests.support.stacks.stack import ROOT, Stack, admitted, new_user_id, rest_items, rpc_items
from tests.support.wait import wait_for

TEXT = {"model": "tiny", "messages": [{"role": "user", "content": "the river runs on"}], "max_tokens": 8}
CLICKED = tuple(str(number) for number in range(1, 21))
SURFACES = """
[shelf]
k = 3
rules = {{ pins = [{{ item_id = "{pinned}", position = 1 }}] }}
[shelf-varied]
rules = {{ pins = [{{ item_id = "{varied}", position = 1 }}] }}
"""
EXPERIMENTS = """
[layers.ranking]
salt = "ranking-1"
[experiments.varied]
layer = "ranking"
surfaces = ["shelf"]
share = 1.0
[experiments.varied.variants.control]
[experiments.varied.variants.varied]
rules = "shelf-varied"
"""
NUM_AGREEING = 12
"""The number of consecutive answers that reach both gateways."""
DURABLE = ("redis", "worker", "serve", "standby", "edge")


@pytest.fixture
def composed(stack: Stack) -> Iterator[ComposeStack]:
    """The shared stack, if it is a container stack."""
    if not isinstance(stack, ComposeStack):
        pytest.skip("needs a stack of containers: make test-compose")
    stack.until_healthy()
    yield stack
    stack.until_healthy()


def record(stack: ComposeStack, user_id: str) -> int:
    """Record twenty clicks, all acknowledged; return the time of the last click."""
    now_ms = int(time.time() * 1_000)
    events = [
        {"user_id": user_id, "item_id": item_id, "event_time_ms": now_ms + index}
        for index, item_id in enumerate(CLICKED)
    ]
    accepted = stack.rest.post("/v1/events", json={"events": events})
    assert accepted.json()["accepted"] == len(CLICKED), accepted.text
    return now_ms + len(CLICKED) - 1


def test_a_restart_loses_no_event_no_feature_and_no_line(composed: ComposeStack) -> None:
    """Acknowledged events survive a restart of store, worker and gateway; features and the last log lines are kept.

    `docker logs` has the last request, and the SIGTERM line of serve and of the standby.
    """
    known = composed.recommend("1")
    user_id = new_user_id()
    last_ms = record(composed, user_id)
    request_id = str(composed.recommend(user_id)["request_id"])
    num_stopped = {part: len(composed.log_lines(part=part, event="stopping")) for part in ("serve", "standby")}

    composed.restart(*DURABLE)
    answer = composed.sees(user_id, last_ms, timeout_s=60.0)
    everything = composed.recommend(user_id, k=1_000, deadline_ms=4_000)

    assert answer["newest_event_time_ms"] == last_ms
    assert not set(CLICKED) & set(rest_items(everything)), "clicked items are seen, so the list has other items"
    assert composed.recommend("1")["newest_event_time_ms"] == known["newest_event_time_ms"]
    assert [line["event"] for line in composed.log_lines(request_id=request_id)] == ["recommended"]
    for part, number in num_stopped.items():
        assert len(composed.log_lines(part=part, event="stopping")) == number + 1, part


def test_a_killed_worker_loses_no_event(composed: ComposeStack) -> None:
    """Events acknowledged right before the worker's SIGKILL are all applied by the next worker."""
    user_id = new_user_id()
    last_ms = record(composed, user_id)

    composed.kill("worker")
    composed.sees(user_id, last_ms, timeout_s=60.0)

    assert not set(CLICKED) & set(rest_items(composed.recommend(user_id, k=1_000, deadline_ms=4_000)))


@pytest.mark.parametrize("part", ["serve", "standby", "edge"])
def test_a_killed_door_opens_again_and_no_event_is_lost(composed: ComposeStack, part: str) -> None:
    """The standby answers without Ray, and Ray without the standby; only a stopped edge closes REST and gRPC."""
    user_id = new_user_id()
    last_ms = record(composed, user_id)

    composed.kill(part)
    if part == "edge":
        composed.until_healthy()
    answer = composed.recommend("1")

    assert answer["items"]
    assert composed.sees(user_id, last_ms, timeout_s=60.0)["newest_event_time_ms"] == last_ms


def test_a_restart_of_the_broker_loses_no_event(composed: ComposeStack) -> None:
    """Events acknowledged while the worker is paused survive a restart of the broker."""
    if not composed.keeps_events():
        pytest.skip("the broker is a stand-in that keeps nothing on disk; run with Apache Kafka's image")
    user_id = new_user_id()
    with composed.frozen("worker"):
        last_ms = record(composed, user_id)
        composed.compose("restart", "kafka", timeout_s=120.0)
    composed.sees(user_id, last_ms, timeout_s=120.0)

    assert not set(CLICKED) & set(rest_items(composed.recommend(user_id, k=1_000, deadline_ms=4_000)))


def test_a_second_up_changes_nothing(composed: ComposeStack) -> None:
    """Rerunning the jobs keeps key, bundle and containers."""
    containers = [composed.container(service) for service in SERVICES.values()]
    version = composed.recommend("1")["bundle_version"]

    composed.compose("up", "--detach", timeout_s=300.0)

    assert [composed.container(service) for service in SERVICES.values()] == containers
    assert composed.recommend("1")["bundle_version"] == version


def test_keys_are_needed_made_and_revoked(composed: ComposeStack) -> None:
    """In containers every call needs a key; a key made by the job `keys` works until it is revoked."""

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return composed.rest.post("/v1/recommendations", json={"user_id": "1"}, headers=headers).status_code

    def keys(*words: str) -> str:
        """Run `tailrace keys` as documented."""
        return composed.compose("run", "--rm", "-T", "keys", "tailrace", "keys", *words).strip()

    key_id = new_user_id()
    key = keys("new", "--id", key_id, "--scope", "recommend")

    assert status("none") == 401
    wait_for(lambda: status(key) == 200, what="the new key's validity")
    keys("revoke", key_id)
    wait_for(lambda: status(key) == 401, what="its end")


def test_files_of_the_mounted_folder_change_answers_while_it_runs(composed: ComposeStack, tmp_path: Path) -> None:
    """REST, gRPC and the standby apply a surface's pin, an edited pin and an experiment, until the files are empty."""
    (tmp_path / "experiments.toml").write_text(EXPERIMENTS)
    experiment = read_experiments(tmp_path / "experiments.toml").by_name["varied"]
    user_id = next(user_id for user_id in iter(new_user_id, None) if experiment.variant_of(user_id) == "varied")
    body = {"user_id": user_id, "surface": "shelf", "deadline_ms": 4_000}

    def until_first(*first: str) -> None:
        """Wait until every gateway puts this item first; None waits until the surface is unknown."""
        with composed.standby() as standby:
            places = {
                "rest": lambda: firsts(admitted(lambda: composed.rest.post("/v1/recommendations", json=body))),
                "grpc": lambda: rpc_firsts(composed, body),
                "standby": lambda: firsts(admitted(lambda: standby.post("/v1/recommendations", json=body))),
            }
            for door, ask in places.items():
                what = f"{first} first at {door}"
                wait_for(lambda ask=ask: all(ask() == [*first] for _ in range(NUM_AGREEING)), 20.0, what)

    until_first()
    composed.write_surfaces("surfaces.toml", SURFACES.format(pinned="50", varied="181"))
    until_first("50")
    composed.write_surfaces("surfaces.toml", SURFACES.format(pinned="100", varied="181"))
    until_first("100")
    composed.write_surfaces("experiments.toml", EXPERIMENTS)
    until_first("181")
    for name in ("experiments.toml", "surfaces.toml"):
        composed.write_surfaces(name, "")
    until_first()


def firsts(response: httpx.Response) -> list[str]:
    """Return the first item of a list of three; None if the surface is unknown."""
    if response.status_code == 422:
        return []
    items = rest_items(response.raise_for_status().json())
    assert len(items) == 3
    return items[:1]


def rpc_firsts(stack: ComposeStack, body: dict[str, Any]) -> list[str]:
    """Return the same over gRPC."""
    try:
        items = rpc_items(stack.rpc.Recommend(pb.RecommendRequest(**body)))
    except grpc.RpcError as refused:
        if refused.code() is not grpc.StatusCode.INVALID_ARGUMENT:
            raise
        return []
    return items[:1]


def test_text_is_served_with_a_checkpoint(composed: ComposeStack, tmp_path: Path) -> None:
    """With TEXT_PATH REST and gRPC generate text, without it they answer 404; recommendations work in both cases."""
    composed.put(write_checkpoint(tmp_path / "tiny", max_positions=256), "/state")

    without = composed.rest.post("/v1/chat/completions", json=TEXT)
    with composed.given(TEXT_PATH="/state/tiny"):
        written = composed.rest.post("/v1/chat/completions", json=TEXT)
        recommended = composed.recommend("1")

    assert without.status_code == 404
    assert written.status_code == 200, written.text
    assert 0 < written.json()["usage"]["completion_tokens"] <= TEXT["max_tokens"]
    assert recommended["items"]


def test_the_page_s_override_serves_names_and_tenants(composed: ComposeStack, tmp_path: Path) -> None:
    """Each name answers, a tenant's events are its own, the pinned name is in memory, and a deletion leaves nothing."""
    (text,) = re.findall(r"```yaml\n(# docker-compose.*?)---\n", (ROOT / "docs/many-models.md").read_text(), re.DOTALL)
    (tmp_path / "many.yml").write_text(text)

    def run(service: str, *words: str) -> str:
        return composed.compose("run", "--rm", "-T", service, "tailrace", *words).strip()

    def ask(key: str, **body: str) -> httpx.Response:
        asked = {"user_id": user_id, "k": 3, "deadline_ms": 4_000, **body}
        return admitted(lambda: composed.rest.post("/v1/recommendations", json=asked, headers=bearer(key)))

    def parts_with(name: str) -> set[str]:
        rows = [line.split() for line in composed.command("bundles", "list", "--resident").stdout.splitlines()]
        return {row[0] for row in rows if row[2:3] == [name]}

    user_id, version = new_user_id(), composed.recommend("1")["bundle_version"]
    with composed.overridden(tmp_path / "many.yml"):
        for name in ("fr", "acme.default"):
            run("pipeline", "bundles", "promote", version, "--name", name)
        run("keys", "tenants", "new", "acme")
        shop = run(
            "keys", "keys", "new", "--id", "shop", "--tenant", "acme", "--scope", "recommend", "--scope", "events"
        )

        event = {"user_id": user_id, "item_id": "50"}
        headers = bearer(shop)
        wait_for(
            lambda: composed.rest.post("/v1/events", json=event, headers=headers).is_success, what="the new key's event"
        )
        wait_for(lambda: ask(shop).json().get("newest_event_time_ms"), what="the tenant's event")
        assert ask(composed.api_key).json()["newest_event_time_ms"] is None
        assert (ask(composed.api_key, surface="fr").status_code, ask(shop, surface="fr").status_code) == (200, 422)
        wait_for(lambda: parts_with("fr") == {"gateway", "llm"}, what="the pinned name in both parts")

        wait_for(lambda: "is deleted" in run("pipeline", "tenants", "delete", "acme", "--yes"), 300.0, "the deletion")
        wait_for(lambda: ask(shop).status_code == 401, what="the end of the tenant's key")
