"""Many names on two real LLM replicas behind a gateway's data plane: loads, evictions, hot names, killed replicas."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.load.lone_plane import plane_over
from models.registry.store import BundleStore
from services.contracts.access import ANYONE
from services.contracts.rank import RankRequest, RankResult
from services.contracts.recommend import Recommendation, RecommendRequest, Tier
from services.errors import BundleNotFound, DeadlineExceeded, ModelLoading, Overloaded, TailraceError
from services.gateway.data_plane import DataPlane
from services.gateway.request.names import NameResidency
from services.items.live_items import LiveItems
from services.items.snapshot import Positions, write_snapshot
from services.llm.engine.config import EngineConfig
from services.llm.ranking.shared_engines import engine_for
from services.router.deadline import Arrival
from services.router.policy import LlmRule
from services.settings.settings import Settings
from tests.support.training.bundles import publish_bundle
from tests.support.wait import until

APP = f"many-names-{os.getpid()}"
NAMES = ("default", *(f"name-{number}" for number in range(5)))
ROOM, IDLE_S = 2.5, 4.0
DEADLINE_MS = 2_000
LOAD_PER_HOME = 1.0
REFUSALS = (ModelLoading, Overloaded, DeadlineExceeded)


@dataclass
class Recorder:
    """The LLM's replicas, with a record of their answers: name, replica, time; and of failures by type."""

    handle: Any
    answers: list[tuple[str, str, float]] = field(default_factory=list)
    rankings: dict[str, set[tuple[str, ...]]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    def replicas(self) -> tuple[str, ...]:
        """Return the running replicas."""
        names: tuple[str, ...] = self.handle.replicas()
        return names

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank and record."""
        try:
            result: RankResult = await self.handle.rank(request, timeout_s)
        except TailraceError as error:
            self.failures[type(error).__name__] += 1
            raise
        self.answers.append((request.name, result.replica, time.monotonic()))
        self.rankings.setdefault(request.name, set()).add(tuple(result.item_ids[:5]))
        return result

    def homes(self, name: str, since_s: float) -> set[str]:
        """Return the replicas that answered for a name since then."""
        return {replica for known, replica, at_s in self.answers if known == name and at_s >= since_s}


@dataclass
class Scene:
    """A gateway's data plane in this process, and two LLM replicas with room for two of six names."""

    plane: DataPlane
    llm: Recorder
    log_file: Path
    unanswered: list[str] = field(default_factory=list)

    async def ask(self, name: str) -> Recommendation | None:
        """Request five items of a name; record a request that gets none in its deadline."""
        began_s = time.monotonic()
        request = RecommendRequest(
            request_id="r", k=5, deadline_ms=DEADLINE_MS, surface=name, recent_item_ids=("i1", "i2", "i3")
        )
        try:
            answer = await self.plane.recommend(request, Arrival(began_s), "rest", ANYONE)
        except TailraceError as error:
            self.unanswered.append(repr(error))
            return None
        if len(answer.items) < 5:
            self.unanswered.append(f"{len(answer.items)} items of {name}")
        return answer

    async def until_ranked(self, *names: str) -> None:
        """Request these names until the LLM answers for each."""

        async def is_ranked(name: str) -> bool:
            answer = await self.ask(name)
            return answer is not None and answer.tier is Tier.LLM

        for name in names:
            give_up_s = time.monotonic() + 120.0
            while not await is_ranked(name):
                assert time.monotonic() < give_up_s, f"{name}: {self.llm.failures}"
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def callers(self, names: Sequence[str], num: int, pause_s: float = 0.0) -> AsyncIterator[None]:
        """Request these names in turn by several callers until the end of the context."""
        done = asyncio.Event()

        async def call(number: int) -> None:
            while not done.is_set():
                await self.ask(names[number % len(names)])
                number += 1
                await asyncio.sleep(pause_s)

        calling = [asyncio.create_task(call(number)) for number in range(num)]
        try:
            yield
        finally:
            done.set()
            await asyncio.gather(*calling)

    def logged(self, event: str, **fields: str) -> list[dict[str, Any]]:
        """Return the replicas' log lines of an event with these fields."""
        wanted = {"event": event, **fields}.items()
        lines = map(json.loads, self.log_file.read_text().splitlines())
        return [line for line in lines if wanted <= line.items()]


def settings_in(folder: Path) -> Settings:
    """Settings of two replicas with room for two of six models; version v-NAME is live under each name."""
    store = BundleStore(folder / "bundles")
    for seed, name in enumerate(NAMES):
        bundle = publish_bundle(folder / "bundles", f"v-{name}", seed=seed)
        store.named(name).promote(f"v-{name}")
    store.promote(f"v-{NAMES[0]}")
    settings = Settings(
        state_dir=folder,
        names=",".join(NAMES),
        bundle_poll_s=0.1,
        kv_num_blocks=64,
        kv_kind="int8",
        llm_replicas=2,
        llm_memory_gib=ROOM * engine_for(bundle, EngineConfig(), 4).size.total / 2**30,
        llm_min_stay_s=0.0,
        llm_idle_s=IDLE_S,
        log_file=folder / "llm.log",
    )
    write_snapshot(settings.items_snapshot, LiveItems(), Positions("", {}))  # no replica ranks without states
    return settings


@pytest.fixture
def deploy(local_ray) -> Callable[[Settings], Any]:
    """A function that deploys the LLM, again if it runs, and returns its handle."""
    from ray import serve

    from services.llm.applications import build_llms
    from services.llm.handles import LlmHandle

    def run(settings: Settings) -> LlmHandle:
        (application,) = build_llms(settings).values()
        return LlmHandle(serve.run(application, name=APP, route_prefix=None))

    return run


@pytest.fixture
async def scene(deploy, tmp_path: Path) -> AsyncIterator[Scene]:
    """A scene in which both replicas are known and hold no model."""
    from ray import serve

    settings = settings_in(tmp_path)
    assert settings.log_file is not None
    settings.log_file.touch()
    llm = Recorder(await asyncio.to_thread(deploy, settings))
    (tmp_path / "surfaces.toml").write_text("".join(f'[{name}]\nmodel = "{name}"\n' for name in NAMES))
    plane = plane_over(
        BundleStore(settings.bundle_root),
        NAMES,
        CollectorRegistry(),
        llms=dict.fromkeys(NAMES, llm),
        residency=NameResidency(budget_bytes=None, min_stay_s=0.0, pinned=frozenset(NAMES)),
        surfaces_file=tmp_path / "surfaces.toml",
        llm_rule=LlmRule(min_history=1, needs_gain=False),
        llm_load_per_home=LOAD_PER_HOME,
        max_llm_in_flight=64,
        breaker_open_s=0.5,
    )
    await plane.start()
    with pytest.raises(BundleNotFound):
        await llm.handle.rank(
            RankRequest(
                request_id="r",
                user_id="u",
                name="none",
                bundle_version="v",
                history_item_ids=("i1",),
                k=1,
                budget_ms=1_000.0,
            ),
            timeout_s=60.0,
        )
    await until(lambda: len(llm.replicas()) == 2, timeout_s=60.0)
    yield Scene(plane, llm, settings.log_file)
    await plane.stop()
    await asyncio.to_thread(serve.delete, APP)


def replica_pids() -> list[int]:
    """Return the processes of the replicas, by their process titles."""
    titles = {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if f"ServeReplica:{APP}:" in title]


async def test_a_hundred_first_calls_start_one_load_on_a_replica(scene: Scene) -> None:
    """All are answered, by another tier, and each replica loads the model once at most."""
    answers = await asyncio.gather(*(scene.ask("name-1") for _ in range(100)))
    await scene.until_ranked("name-1")
    loads = Counter(line["pid"] for line in scene.logged("model_loaded", name="name-1"))

    assert scene.unanswered == []
    assert None not in answers
    assert 1 <= len(loads) <= 2
    assert set(loads.values()) == {1}


async def test_names_are_evicted_without_a_failed_or_wrong_answer(scene: Scene) -> None:
    """Names displace each other under load: no request fails, and each name ranks as it did before."""
    async with scene.callers(NAMES, num=12):
        await until(lambda: len(scene.logged("model_unloaded", reason="room")) >= 20, timeout_s=120.0)

    assert scene.unanswered == []
    assert set(scene.llm.failures) <= {error.__name__ for error in REFUSALS}
    assert len(scene.llm.rankings) >= 3
    assert all(len(rankings) == 1 for rankings in scene.llm.rankings.values())


async def test_a_hot_name_spreads_to_both_replicas_and_back(scene: Scene) -> None:
    """A loaded name is on two replicas, and on one after the load."""
    await scene.until_ranked("name-1")
    began_s = time.monotonic()
    async with scene.callers(["name-1"], num=24):
        await until(lambda: len(scene.llm.homes("name-1", began_s)) == 2, timeout_s=60.0)
    async with scene.callers(["name-1"], num=1, pause_s=0.05):
        await until(lambda: scene.logged("model_unloaded", name="name-1", reason="idle"), timeout_s=60.0)
        quiet_s = time.monotonic()
        await asyncio.sleep(1.0)

    assert scene.unanswered == []
    assert len(scene.llm.homes("name-1", quiet_s)) == 1


async def test_a_killed_replica_and_a_rolling_restart_fail_no_request(scene: Scene, deploy, tmp_path: Path) -> None:
    """Names stay answered and are loaded again, after the kill of a replica and after all replicas were replaced."""
    names = NAMES[:2]
    await scene.until_ranked(*names)
    async with scene.callers(names, num=4, pause_s=0.02):
        os.kill(replica_pids()[0], signal.SIGKILL)
        await until(lambda: len(set(replica_pids())) == 2 and len(scene.llm.replicas()) == 2, timeout_s=120.0)
        await scene.until_ranked(*names)
        before = set(replica_pids())
        restarted = settings_in(tmp_path).model_copy(update={"max_waiting": 63})
        await asyncio.to_thread(deploy, restarted)
        await until(lambda: len(pids := set(replica_pids())) == 2 and not pids & before, timeout_s=120.0)
        await scene.until_ranked(*names)

    assert scene.unanswered == []
