"""Two names and a canary on a separate stack: REST, gRPC, standby and restarts give a user the same version."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from models.catalogue import load_catalogue
from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from services.contracts import recommend_pb2 as pb
from services.contracts.experiments import place_of
from tests.support.servers import HOST
from tests.support.stacks.stack import Stack, admitted
from tests.support.wait import wait_for

LIVE, CANDIDATE = "v1", "v2"
SHARE = 0.3
UNITS = [f"unit-{number}" for number in range(40)]
WAYS = ("rest", "grpc", "standby", "session")
DEADLINE_MS = 2_000


@pytest.fixture
def named(stack: Stack, tmp_path: Path) -> Iterator[Stack]:
    """A stack that serves the shared bundle as default, and as mail a bundle with reversed popularity."""
    (tmp_path / "surfaces.toml").write_text('[mail]\nmodel = "mail"\n')
    own = Stack(tmp_path / "state", names="default,mail", gateway_replicas=2, surfaces_file=tmp_path / "surfaces.toml")
    trained, store = BundleStore(stack.settings.bundle_root).live(), BundleStore(own.settings.bundle_root)
    about = {name: value for name, value in trained.manifest.items() if name not in {"version", "files"}}
    source = shutil.copytree(trained.path, tmp_path / "source", ignore=shutil.ignore_patterns("manifest.json"))
    store.publish(source, LIVE, about)
    catalogue = load_catalogue(source / "catalogue.parquet")
    replace(catalogue, popularity=1.0 + catalogue.popularity.max() - catalogue.popularity).save(
        source / "catalogue.parquet"
    )
    store.publish(source, CANDIDATE, about)
    store.promote(LIVE)
    store.named("mail").promote(CANDIDATE)
    own.start()
    yield own
    own.close()


pytestmark = (
    pytest.mark.grid
)  # tests/unit/gateway/test_names.py holds both doors; test_experiments.py the same hash everywhere


def versions(stack: Stack, surface: str | None = None) -> dict[str, list[str]]:
    """Return the version that answers each user and session, by entry point."""
    standby = httpx.Client(base_url=f"http://{HOST}:{stack.settings.standby_http_port}", timeout=20.0)
    by_way: dict[str, list[str]] = {name: [] for name in WAYS}
    with standby:
        for unit in UNITS:
            body = {"user_id": unit, "k": 1, "deadline_ms": DEADLINE_MS, "surface": surface}
            visitor = {
                "session_id": unit,
                "recent_item_ids": ["50"],
                "k": 1,
                "deadline_ms": DEADLINE_MS,
                "surface": surface,
            }
            for name, client, sent in (
                ("rest", stack.rest, body),
                ("standby", standby, body),
                ("session", stack.rest, visitor),
            ):
                reply = admitted(lambda c=client, s=sent: c.post("/v1/recommendations", json=s))  # type: ignore[misc]
                by_way[name].append(reply.raise_for_status().json()["bundle_version"])
            answer = stack.rpc.Recommend(
                pb.RecommendRequest(user_id=unit, k=1, deadline_ms=DEADLINE_MS, surface=surface or "")
            )
            by_way["grpc"].append(answer.bundle_version)
    return by_way


def until_all_have(stack: Stack, expected: list[str]) -> None:
    """Wait until each gateway and the standby have loaded the name's bundles."""
    wait_for(lambda: versions(stack) == dict.fromkeys(WAYS, expected), 60.0, "the versions at each way in")


def test_a_user_has_the_same_version_everywhere_and_after_a_restart(named: Stack) -> None:
    """The hash decides who gets the candidate, before and after gateway kills; mail always uses its own bundle."""
    store = BundleStore(named.settings.bundle_root)
    since_ms = int(time.time() * 1_000) + 4_000
    canary = store.release(CANDIDATE, [CanaryStage(SHARE, 0.0)], since_ms, by_hand=True)
    expected = [CANDIDATE if place_of(canary.salt, unit) < SHARE else LIVE for unit in UNITS]
    until_all_have(named, expected)

    own = {"version": CANDIDATE, "name": "default", "role": "canary"}
    wait_for(lambda: named.metric("tailrace_llm_replicas", **own) == 1, 60.0, "the candidate in the LLM")
    mail = versions(named, surface="mail")
    listed = named.command("bundles", "list").stdout
    killed = named.replica_pids(lambda name: "Gateway" in name)
    named.kill_processes(killed)
    wait_for(lambda: not set(killed) & set(named.replica_pids(lambda name: "Gateway" in name)), 60.0, "their end")
    named.until_healthy()
    after = versions(named)
    store.promote(CANDIDATE)
    until_all_have(named, [CANDIDATE] * len(UNITS))

    assert set(expected) == {LIVE, CANDIDATE}
    assert after == dict.fromkeys(WAYS, expected)
    assert mail == dict.fromkeys(WAYS, [CANDIDATE] * len(UNITS))
    assert f"{CANDIDATE} is the canary of default: 0.3 of its users get it" in listed
    assert len(killed) == 2
