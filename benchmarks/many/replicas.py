"""The rows of two LLM replicas (Ray) with room for two of six names, behind a gateway's data plane in this process."""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from prometheus_client import CollectorRegistry

from benchmarks.engine.curves import random_decoder
from benchmarks.load.local_ray import local_ray
from benchmarks.load.lone_plane import plane_over, write_bundle
from benchmarks.many.store import FAULTS, StoreFaults, version_of
from benchmarks.many.wire import wire_to_store
from benchmarks.scale.row import catalogue_of
from models.decoder.weights import save_decoder
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

APP = f"many-names-{os.getpid()}"
NAMES = ("default", *(f"name-{number}" for number in range(5)))
HOT = NAMES[1]
ROOM, IDLE_S = 2.5, 4.0
DEADLINE_MS = 2_000
REFUSALS = tuple(error.__name__ for error in (ModelLoading, Overloaded, DeadlineExceeded))
_LOAD_PER_HOME = 1.0
_NUM_ITEMS = 200
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_HISTORY = tuple(catalogue_of(4).item_ids[1:])
_NUM_FIRST_CALLS, _NUM_CALLERS, _NUM_HOT_CALLERS = 100, 12, 24
_GIVE_UP_S, _CYCLES_S = 120.0, 180.0
_LOOK_S, _LOG_LOOK_S, _PAUSE_S = 0.2, 2.0, 0.05
_MIB = 2**20


@dataclass
class RecordedLlm:
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


class LogLines:
    """The replicas' log lines, read from a pipe: a full disk has no effect on it."""

    def __init__(self, path: Path) -> None:
        self._pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # also for writing: the end of a writer ends no line
        self._lines: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read, name="log-lines", daemon=True)
        self._reading.start()

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of an event so far."""
        return [line for line in self._lines[:] if line["event"] == event]

    def stop(self) -> None:
        """Read all lines so far, then no more."""
        os.write(self._pipe, b"\0\n")
        self._reading.join()
        os.close(self._pipe)

    def _read(self) -> None:
        with open(self._pipe, "rb", closefd=False) as pipe:
            for line in iter(pipe.readline, b"\0\n"):
                with suppress(ValueError):  # lines longer than a page of the pipe may be torn
                    self._lines.append(json.loads(line))


@dataclass
class ReplicaScene:
    """A gateway's data plane in this process, and two LLM replicas."""

    plane: DataPlane
    llm: RecordedLlm
    settings: Settings
    lines: LogLines
    unanswered: list[str] = field(default_factory=list)

    async def ask(self, name: str) -> Recommendation | None:
        """Request five items of a name; record a request that gets none in its deadline."""
        began_s = time.monotonic()
        request = RecommendRequest(
            request_id=uuid4().hex,  # the session of an anonymous request, which has one replica
            k=5,
            deadline_ms=DEADLINE_MS,
            surface=name,
            recent_item_ids=_HISTORY,
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
        """Request these names until the LLM answers for each. Raises TimeoutError."""
        give_up_s = time.monotonic() + _GIVE_UP_S
        for name in names:
            while (answer := await self.ask(name)) is None or answer.tier is not Tier.LLM:
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"{name} is not ranked: {self.llm.failures}")
                await asyncio.sleep(_PAUSE_S)

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
        return [line for line in self.lines.of(event) if fields.items() <= line.items()]

    def holders(self, name: str) -> set[int]:
        """Return the running replicas, by process, that have a name's model in memory."""
        loads, unloads = (
            Counter(line["pid"] for line in self.logged(event, name=name))
            for event in ("model_loaded", "model_unloaded")
        )
        return {pid for pid in replica_pids() if loads[pid] > unloads[pid]}

    def num_displaced(self) -> int:
        """Return how many models were unloaded for room."""
        return len(self.logged("model_unloaded", reason="room"))

    def redeploy(self, **changes: Any) -> None:
        """Replace all replicas, one after another."""
        deploy(self.settings.model_copy(update=changes))


def replica_settings(folder: Path, bundle_store: str = "") -> Settings:
    """Return settings of two replicas with room for `ROOM` models; version v-NAME is live under each name."""
    settings = Settings(
        state_dir=folder,
        cache_dir=folder / "cache",
        bundle_store=bundle_store,
        names=",".join(NAMES),
        bundle_poll_s=0.1,
        kv_num_blocks=64,
        kv_kind="int8",
        llm_replicas=2,
        llm_min_stay_s=0.0,
        llm_idle_s=IDLE_S,
        log_file=folder / "llm.log",
    )
    store = BundleStore.of(settings)
    for seed, name in enumerate(NAMES):
        _publish(store, name, folder / "sources" / name, seed)
    write_snapshot(settings.items_snapshot, LiveItems(), Positions("", {}))  # no replica ranks without states
    num_bytes = engine_for(store.named(HOT).live(), EngineConfig(), 4).size.total
    os.mkfifo(folder / "llm.log")
    (folder / "surfaces.toml").write_text("".join(f'[{name}]\nmodel = "{name}"\n' for name in NAMES))
    return settings.model_copy(
        update={"llm_memory_gib": ROOM * num_bytes / 2**30, "surfaces_file": folder / "surfaces.toml"}
    )


def _publish(store: BundleStore, name: str, source: Path, seed: int) -> None:
    """Make a bundle with a random decoder live under a name."""
    source.parent.mkdir(exist_ok=True)
    catalogue = catalogue_of(_NUM_ITEMS)
    write_bundle(catalogue, source)
    save_decoder(random_decoder(catalogue.vocab_size, seed=seed, shape=_SIZES), source / "decoder")
    (source / "student.onnx").write_bytes(b"")
    store.publish(source, version_of(name), {"dataset": "made up", "prompt": {"max_items": 20, "stride": 5}})
    store.named(name).promote(version_of(name))


def deploy(settings: Settings) -> Any:
    """Deploy the LLM on the running Ray, again if it runs, and return its handle."""
    from ray import serve

    from services.llm.applications import build_llms
    from services.llm.handles import LlmHandle

    (application,) = build_llms(settings).values()
    return LlmHandle(serve.run(application, name=APP, route_prefix=None))


@asynccontextmanager
async def replica_scene(settings: Settings) -> AsyncIterator[ReplicaScene]:
    """Yield a scene with two known replicas that hold no model."""
    from ray import serve

    assert settings.log_file is not None
    lines = LogLines(settings.log_file)
    llm = RecordedLlm(await asyncio.to_thread(deploy, settings))
    plane = plane_over(
        BundleStore.of(settings),
        NAMES,
        CollectorRegistry(),
        llms=dict.fromkeys(NAMES, llm),
        residency=NameResidency(budget_bytes=None, min_stay_s=0.0, pinned=frozenset(NAMES)),
        surfaces_file=settings.surfaces_file,
        llm_rule=LlmRule(min_history=1, needs_gain=False),
        llm_load_per_home=_LOAD_PER_HOME,
        max_llm_in_flight=64,
        breaker_open_s=0.5,
    )
    await plane.start()
    nothing = RankRequest(
        request_id="r", user_id=None, bundle_version="v", history_item_ids=_HISTORY, k=1, budget_ms=1_000.0, name="none"
    )
    with suppress(BundleNotFound):
        await llm.handle.rank(nothing, timeout_s=60.0)  # the handle learns the replicas from its first call
    await until(lambda: len(llm.replicas()) == 2)
    try:
        yield ReplicaScene(plane, llm, settings, lines)
    finally:
        await plane.stop()
        await asyncio.to_thread(serve.delete, APP)
        lines.stop()


async def until(is_so: Callable[[], bool], within_s: float = _GIVE_UP_S, look_s: float = _LOOK_S) -> float:
    """Wait until a condition holds, and return the seconds. Raises TimeoutError."""
    began_s = time.monotonic()
    for _ in range(int(within_s / look_s)):
        if is_so():
            return time.monotonic() - began_s
        await asyncio.sleep(look_s)
    raise TimeoutError(f"not within {within_s:g} s")


def replica_pids() -> list[int]:
    """Return the processes of the replicas, by their process titles."""
    return [pid for pid, title in _titles().items() if f"ServeReplica:{APP}:" in title]


def _titles() -> dict[int, str]:
    return {process.pid: " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])}


async def measure_replicas(url: str, folder: Path, num_cycles: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the rows."""
    await asyncio.to_thread(folder.mkdir)
    with wire_to_store() as wire, local_ray():
        settings = replica_settings(folder, url)
        faults = StoreFaults(url, wire, settings.bundle_root)
        async with replica_scene(settings) as scene:
            yield await first_calls(scene)
            yield await cycles(scene, num_cycles)
            for number, fault in enumerate(FAULTS):
                for row in (hot, killed, restarted):
                    before = len(scene.unanswered)
                    try:
                        await scene.until_ranked(*NAMES[:2])
                        with faults.happening(fault, _ray_pids(), is_cached=True):
                            measured = await row(scene, number)
                    except TimeoutError as error:  # the other rows can still be measured
                        measured = {"error": str(error)}
                    unanswered = len(scene.unanswered) - before
                    yield {"row": f"replicas, {row.__name__}", "fault": fault, **measured, "unanswered": unanswered}


def _ray_pids() -> list[int]:
    """Return the processes that are replicas, or can become one."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    return [pid for pid, title in _titles().items() if pid in ours and title.startswith(("ray::IDLE", "ray::ServeRep"))]


async def first_calls(scene: ReplicaScene) -> dict[str, Any]:
    """Request a name that no replica holds many times at once; count its loads by replica."""
    await asyncio.gather(*(scene.ask(HOT) for _ in range(_NUM_FIRST_CALLS)))
    await scene.until_ranked(HOT)
    loads = Counter(line["pid"] for line in scene.logged("model_loaded", name=HOT))
    return {
        "row": "replicas, first calls",
        "calls": _NUM_FIRST_CALLS,
        "loads": sorted(loads.values()),
        "unanswered": len(scene.unanswered),
    }


async def cycles(scene: ReplicaScene, num_cycles: int) -> dict[str, Any]:
    """Let names displace each other under load; compare the replicas' memory, and each name's rankings."""
    memory = []
    async with scene.callers(NAMES, _NUM_CALLERS):
        for share in (0.25, 1.0):
            with suppress(TimeoutError):  # the row says how many there were
                await until(partial(_has_displaced, scene, share * num_cycles), _CYCLES_S, _LOG_LOOK_S)
            memory.append(sum(psutil.Process(pid).memory_info().rss for pid in replica_pids()) / _MIB)
    return {
        "row": "replicas, cycles",
        "evictions": scene.num_displaced(),
        "rss_after_quarter_mib": memory[0],
        "rss_mib": memory[1],
        "growth": memory[1] / memory[0] - 1,
        "unanswered": len(scene.unanswered),
        "failures": dict(scene.llm.failures),
        "rankings_by_name": sorted(map(len, scene.llm.rankings.values())),
    }


def _has_displaced(scene: ReplicaScene, num: float) -> bool:
    return scene.num_displaced() >= num


async def hot(scene: ReplicaScene, _number: int) -> dict[str, Any]:
    """Return the seconds until two replicas answer for a loaded name, and until one holds its model after the load."""
    began_s = time.monotonic()
    async with scene.callers([HOT], _NUM_HOT_CALLERS):
        spread_s = await until(lambda: len(scene.llm.homes(HOT, began_s)) == 2)
    async with scene.callers([HOT], 1, pause_s=_PAUSE_S):
        shrunk_s = await until(lambda: len(scene.holders(HOT)) == 1)
    return {"two_replicas_s": spread_s, "one_holder_s": shrunk_s}


async def killed(scene: ReplicaScene, _number: int) -> dict[str, Any]:
    """Kill a replica under load, and return the seconds until two run and both names are ranked."""
    async with scene.callers(NAMES[:2], 4, pause_s=0.02):
        before = replica_pids()
        os.kill(before[0], signal.SIGKILL)
        seconds = await until(lambda: len({*replica_pids()} - {before[0]}) == 2 and len(scene.llm.replicas()) == 2)
        return {"replaced_s": seconds, "ranked_s": seconds + await _seconds_until_ranked(scene)}


async def restarted(scene: ReplicaScene, number: int) -> dict[str, Any]:
    """Replace both replicas under load, and return the seconds until both names are ranked."""
    async with scene.callers(NAMES[:2], 4, pause_s=0.02):
        began_s, before = time.monotonic(), {*replica_pids()}
        await asyncio.to_thread(scene.redeploy, max_waiting=scene.settings.max_waiting - 1 - number)
        await until(lambda: len(pids := {*replica_pids()}) == 2 and not pids & before)
        seconds = time.monotonic() - began_s
        return {"replaced_s": seconds, "ranked_s": seconds + await _seconds_until_ranked(scene)}


async def _seconds_until_ranked(scene: ReplicaScene) -> float:
    began_s = time.monotonic()
    await scene.until_ranked(*NAMES[:2])
    return time.monotonic() - began_s
