"""Ranking and text on a real local Ray: killed replicas, version changes, leaving callers, and affinity."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from models.registry.store import BundleStore
from services.contracts.rank import RankRequest, RankResult
from services.contracts.text import SamplingOptions, TextDone, TextEvent, TextRequest
from services.errors import (
    BundleMismatch,
    BundleNotFound,
    DeadlineExceeded,
    DependencyUnavailable,
    Overloaded,
    TailraceError,
)
from services.items.live_items import LiveItems
from services.items.snapshot import Positions, write_snapshot
from services.settings.settings import Settings
from tests.support.engine.checkpoints import write_checkpoint
from tests.support.training.bundles import publish_bundle
from tests.support.wait import until_answer

APP = f"tests-{os.getpid()}"
LONG = {"ignore_eos": True, "max_tokens": 30_000}


@pytest.fixture
async def run(running_ray) -> AsyncIterator[Callable[[Any], Any]]:
    """A function that runs a deployment and returns Ray's handle; the deployment is deleted afterwards."""
    from ray import serve

    yield lambda application: serve.run(application, name=APP, route_prefix=None)
    await asyncio.to_thread(serve.delete, APP)


def replica_pids() -> list[int]:
    """Return the processes of this test's replicas, by their process titles."""
    titles = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if f"ServeReplica:{APP}:" in title]


# ranking


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings for a folder of this test."""
    settings = Settings(state_dir=tmp_path, bundle_poll_s=0.1, kv_num_blocks=64)
    write_snapshot(settings.items_snapshot, LiveItems(), Positions("", {}))  # no replica ranks without states
    return settings


@pytest.fixture
def rankers(run) -> Callable[[Settings], Any]:
    """A function that runs the LLM and returns its handle."""
    from services.llm.applications import build_llm
    from services.llm.handles import LlmHandle

    return lambda settings: LlmHandle(run(build_llm(settings)))


def rank_request(version: str, user_id: str = "u", **fields) -> RankRequest:
    """Build a request of a user with a history of ten items."""
    known = {
        "request_id": "r",
        "user_id": user_id,
        "bundle_version": version,
        "history_item_ids": tuple(f"i{index}" for index in range(10)),
        "k": 5,
        "budget_ms": 60_000.0,
    }
    return RankRequest(**{**known, **fields})


async def rank_until_served(handle, version: str) -> RankResult:
    """Rank until there is a result."""
    rank = partial(handle.rank, rank_request(version), timeout_s=1.0)
    return await until_answer(rank, lambda _: True, 120.0, passing=TailraceError)


async def first_failure(handle, within_s: float) -> TailraceError:
    """Rank until a request fails; return the error."""
    give_up_s = time.monotonic() + within_s
    while time.monotonic() < give_up_s:
        try:
            await handle.rank(rank_request("v1"), timeout_s=5.0)
        except TailraceError as error:
            return error
    raise AssertionError(f"nothing failed within {within_s} s")


async def test_a_replica_ranks_dies_and_comes_back(rankers, settings) -> None:
    """A replica refuses without a bundle or for other versions, keeps timeouts, and is replaced after a kill."""
    handle = rankers(settings)
    with pytest.raises(BundleNotFound):
        await handle.rank(rank_request("v1"), timeout_s=20.0)
    publish_bundle(settings.bundle_root, "v1")

    result = await rank_until_served(handle, "v1")

    assert len(result.item_ids) == 5
    assert result.bundle_version == "v1"
    assert handle.replicas() == (result.replica,)  # observations for the gate
    warm = await handle.rank(rank_request("v1"), timeout_s=20.0)
    assert warm.item_ids == result.item_ids
    with pytest.raises(BundleMismatch) as mismatch:
        await handle.rank(rank_request("v0"), timeout_s=20.0)
    assert (mismatch.value.wanted, mismatch.value.loaded) == ("v0", "v1")

    with pytest.raises(DeadlineExceeded):
        await handle.rank(rank_request("v1"), timeout_s=0.0001)
    assert await handle.rank(rank_request("v1"), timeout_s=20.0)

    os.kill(replica_pids()[0], signal.SIGKILL)
    for _ in range(2):
        assert isinstance(await first_failure(handle, within_s=5.0), DependencyUnavailable)

    again = await rank_until_served(handle, "v1")
    assert again.item_ids == result.item_ids


# text


@pytest.fixture
def writers(run, tmp_path: Path) -> Callable[..., Any]:
    """A function that runs text over a tiny checkpoint and returns its handle."""
    from services.llm.applications import build_text
    from services.llm.handles import TextHandle

    def start(**fields):
        folder = write_checkpoint(tmp_path / "tiny", max_positions=32_000)
        settings = Settings(state_dir=tmp_path, text_path=str(folder), text_max_tokens=30_000, **fields)
        return TextHandle(run(build_text(settings)), default_deadline_s=120.0)

    return start


def text_request(**fields) -> TextRequest:
    """Build a greedy request."""
    known = {
        "request_id": "r",
        "model": "tiny",
        "prompt": "the tail gets out",
        "max_tokens": 16,
        "sampling": SamplingOptions(temperature=0),
    }
    return TextRequest(**{**known, **fields})


async def written(handle, **fields) -> list[TextEvent]:
    return [event async for event in handle.write(text_request(**fields))]


async def test_a_child_in_other_weights_goes_live_under_load_and_is_rolled_back(rankers, settings) -> None:
    """Promoting and rolling back a 4-bit child under load fails only requests for a version that the replica has left.

    The gateway answers those by another tier.
    """
    store, parent = BundleStore(settings.bundle_root), publish_bundle(settings.bundle_root, "v1")
    serving = {"prompt": parent.manifest["prompt"], "serving": {"weight_kind": "int4"}}
    store.publish(settings.bundle_root.parent / "source-v1", "v1-int4", serving)
    handle = rankers(settings)
    scores = {"v1": (await rank_until_served(handle, "v1")).scores}
    answered: list[str] = []
    lost: list[TailraceError] = []
    done = asyncio.Event()

    async def call(number: int) -> None:
        """Send requests in sequence to the live version."""
        while not done.is_set():
            try:
                version = store.live_version() or ""
                result = await handle.rank(rank_request(version, f"u{number}"), timeout_s=20.0)
                answered.append(result.bundle_version)
            except BundleMismatch:
                continue
            except TailraceError as error:
                lost.append(error)

    async def answers_of(version: str) -> None:
        """Wait for twenty answers of a version."""
        answered.clear()
        give_up_s = time.monotonic() + 60.0
        while answered.count(version) < 20:
            assert time.monotonic() < give_up_s, f"{version} does not serve"
            await asyncio.sleep(0.02)

    callers = [asyncio.create_task(call(number)) for number in range(4)]
    await answers_of("v1")
    store.promote("v1-int4")
    await answers_of("v1-int4")
    scores["v1-int4"] = (await rank_until_served(handle, "v1-int4")).scores
    assert store.rollback(by="ann", reason="test") == "v1"
    await answers_of("v1")
    scores["v1 again"] = (await rank_until_served(handle, "v1")).scores
    done.set()
    await asyncio.gather(*callers)

    assert lost == []
    assert scores["v1 again"] == pytest.approx(scores["v1"])
    assert scores["v1-int4"] != pytest.approx(scores["v1"], abs=1e-4)
    assert scores["v1-int4"] == pytest.approx(scores["v1"], abs=0.5)


async def test_a_disconnect_frees_a_place_and_a_full_queue_refuses(writers) -> None:
    """With one running slot and one waiting slot a third request is overloaded; a disconnect frees the slot."""
    handle = writers(max_running=1, max_waiting=1)
    first = handle.write(text_request(**LONG))
    await anext(first)

    others = [asyncio.create_task(written(handle)) for _ in range(2)]
    refused, waiting = await asyncio.wait(others, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
    await first.aclose()
    events = await asyncio.wait_for(waiting.pop(), 60.0)

    assert [type(task.exception()) for task in refused] == [Overloaded]
    assert isinstance(events[-1], TextDone)


async def test_of_two_replicas_one_may_die(writers) -> None:
    """Prompts stick to a replica and both serve; after a kill the second serves every new or unstarted request."""
    handle = writers(text_replicas=2, kv_block_tokens=4)
    prompts = [f"{number} times the tail gets out of the turbine" for number in range(12)]

    async def cached_of(prompt: str) -> int:
        done = (await written(handle, prompt=prompt))[-1]
        assert isinstance(done, TextDone)
        await asyncio.sleep(0.05)  # the router records an answer's end a moment later
        return done.num_cached_tokens

    cold = [await cached_of(prompt) for prompt in prompts]
    warm = [await cached_of(prompt) for prompt in prompts]
    whole = {"max_tokens": 200, "ignore_eos": True, "in_pieces": False}
    under_way = [asyncio.create_task(written(handle, prompt=f"again {prompt}", **whole)) for prompt in prompts]
    await cached_of("one that comes back while they are under way")
    os.kill(replica_pids()[0], signal.SIGKILL)
    left = await asyncio.gather(*map(cached_of, prompts))
    ended = await asyncio.gather(*under_way)

    assert all(many > few for many, few in zip(warm, cold, strict=True)), (cold, warm)
    assert [events[-1].num_completion_tokens for events in ended] == [200] * len(prompts)
    assert any(many == few for many, few in zip(left, warm, strict=True))
    assert any(many < few for many, few in zip(left, warm, strict=True))
