"""Many names on two real LLM replicas behind a gateway's data plane: loads, evictions, hot names, killed replicas."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.many.replicas import NAMES, REFUSALS, ReplicaScene, replica_pids, replica_scene, replica_settings
from models.registry.store import BundleStore
from tests.support.training.bundles import publish_adapter
from tests.support.wait import until


@pytest.fixture
async def scene(running_ray, tmp_path: Path) -> AsyncIterator[ReplicaScene]:
    """A scene with two known replicas that hold no model and have room for two of six names."""
    async with replica_scene(replica_settings(tmp_path)) as scene:
        yield scene


async def test_a_hundred_first_calls_start_one_load_on_a_replica(scene: ReplicaScene) -> None:
    """All are answered, by another tier, and each replica loads the model once at most."""
    answers = await asyncio.gather(*(scene.ask("name-1") for _ in range(100)))
    await scene.until_ranked("name-1")
    loads = Counter(line["pid"] for line in scene.logged("model_loaded", name="name-1"))

    assert scene.unanswered == []
    assert None not in answers
    assert 1 <= len(loads) <= 2
    assert set(loads.values()) == {1}


async def test_names_are_evicted_without_a_failed_or_wrong_answer(scene: ReplicaScene) -> None:
    """Names displace each other under load: no request fails, and each name ranks as it did before."""
    async with scene.callers(NAMES, num=12):
        await until(lambda: scene.num_displaced() >= 20, timeout_s=120.0)

    assert scene.unanswered == []
    assert set(scene.llm.failures) <= set(REFUSALS)
    assert len(scene.llm.rankings) >= 3
    assert all(len(rankings) == 1 for rankings in scene.llm.rankings.values())


async def test_a_hot_name_spreads_to_both_replicas_and_back(scene: ReplicaScene) -> None:
    """A name under load is in the memory of two replicas, and of one after the load."""
    await scene.until_ranked("name-1")
    began_s = time.monotonic()
    async with scene.callers(["name-1"], num=24):
        await until(lambda: len(scene.llm.homes("name-1", began_s)) == 2, timeout_s=60.0)
        assert len(scene.holders("name-1")) == 2
    async with scene.callers(["name-1"], num=1, pause_s=0.05):
        await until(lambda: len(scene.holders("name-1")) == 1, timeout_s=60.0)

    assert scene.unanswered == []
    assert scene.logged("model_unloaded", name="name-1", reason="idle")


async def test_a_killed_replica_and_a_rolling_restart_fail_no_request(scene: ReplicaScene) -> None:
    """Names stay answered and are loaded again, after the kill of a replica and after all replicas were replaced."""
    names = NAMES[:2]
    await scene.until_ranked(*names)
    async with scene.callers(names, num=4, pause_s=0.02):
        os.kill(replica_pids()[0], signal.SIGKILL)
        await until(lambda: len(set(replica_pids())) == 2 and len(scene.llm.replicas()) == 2, timeout_s=120.0)
        await scene.until_ranked(*names)
        before = set(replica_pids())
        await asyncio.to_thread(scene.redeploy, max_waiting=63)
        await until(lambda: len(pids := set(replica_pids())) == 2 and not pids & before, timeout_s=120.0)
        await scene.until_ranked(*names)

    assert scene.unanswered == []


async def test_adapters_of_one_decoder_rank_on_both_replicas(running_ray, tmp_path: Path) -> None:
    """Five adapters and their parent share a decoder on each replica, also after a replica was killed.

    Each name ranks by its own adapter, and alike on both.
    """
    settings = replica_settings(tmp_path).model_copy(update={"llm_memory_gib": 1.0, "llm_idle_s": 0.0})
    parent = BundleStore.of(settings).live()
    for seed, name in enumerate(NAMES[1:]):
        publish_adapter(settings.bundle_root, f"adapter-{name}", parent, seed, name=name)

    async with replica_scene(settings) as scene:
        await scene.until_ranked(*NAMES)
        async with scene.callers(NAMES, num=12, pause_s=0.02):
            os.kill(replica_pids()[0], signal.SIGKILL)
            await until(lambda: len(set(replica_pids())) == 2 and len(scene.llm.replicas()) == 2, timeout_s=120.0)
            restarted_s = time.monotonic()
            await scene.until_ranked(*NAMES)
            await until(
                lambda: len({replica for _, replica, at_s in scene.llm.answers if at_s > restarted_s}) == 2,
                timeout_s=60.0,
            )

    rankings = scene.llm.rankings
    assert scene.unanswered == []
    assert [len(rankings[name]) for name in NAMES] == [1] * len(NAMES)
    assert len(set.union(*rankings.values())) == len(NAMES)
    assert scene.logged("adapter_merged") == []
