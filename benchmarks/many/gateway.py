"""The rows of one gateway with many names over an object store."""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from prometheus_client import CollectorRegistry

from benchmarks.load.lone_plane import plane_over
from benchmarks.load.open_loop import percentile
from benchmarks.many.store import FAULTS, StoreFaults, publish_many
from benchmarks.many.wire import wire_to_store
from models.registry.storage.objects import ObjectStorage
from models.registry.store import BundleStore
from pipelines.planner.names import zipf_shares
from services.contracts.access import ANYONE
from services.contracts.items import ItemState
from services.contracts.recommend import Reason, RecommendRequest
from services.errors import TailraceError
from services.garbage import freeze_start
from services.gateway.data_plane import DataPlane
from services.gateway.request.live_bundle import memory_of
from services.gateway.request.names import NameResidency
from services.items.live_items import LiveItems
from services.residency.state import FORGET_S
from services.router.deadline import Arrival

DEADLINE_MS = 200
_POLL_S = 5.0
_NUM_AT_ONCE = 2
RATE_RPS = 100.0
_SETTLED_S = FORGET_S + _POLL_S
"""Without requests, no name waits to be loaded, and so displaces another, after this time."""
_NUM_FIRST_CALLS = 100
_NUM_FAULT_CALLS, _NUM_RESTARTED_CALLS = 100, 20
_NUM_IMPORTED, _RECORDS_AT_ONCE, _NUM_IMPORTED_CALLS = 10_000, 500, 1_000
_MAX_LOOKS, _LOOK_S = 1_000, 0.1
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """The outcome of a request: latency, whether its bundle answered, whether it was answered at all, or the error.

    `was_loaded`: the bundle was in memory when the request arrived, so that it waited for no load.
    """

    ms: float
    is_warm: bool
    is_answered: bool
    was_loaded: bool
    error: str = ""


class MeasuredPlane:
    """A started data plane and its registry."""

    def __init__(self, plane: DataPlane, registry: CollectorRegistry, items: LiveItems, start_s: float) -> None:
        self.plane, self.registry, self.items, self.start_s = plane, registry, items, start_s
        self._random = np.random.default_rng(0)

    async def ask(self, name: str) -> LocalAnswer:
        """Request ten items of a name, for a visitor with one known item: the student answers if it is loaded."""
        began_s, was_loaded = time.monotonic(), self.plane.names.of(name).is_loaded
        request = RecommendRequest(
            request_id="r", k=10, deadline_ms=DEADLINE_MS, surface=name, recent_item_ids=("item-0000001",)
        )
        try:
            answer = await self.plane.recommend(request, Arrival(began_s), "rest", ANYONE)
        except TailraceError as error:
            return LocalAnswer(1_000 * (time.monotonic() - began_s), False, False, was_loaded, type(error).__name__)
        ms, is_warm = 1_000 * (time.monotonic() - began_s), answer.reason is not Reason.MODEL_LOADING
        return LocalAnswer(ms, is_warm=is_warm, is_answered=len(answer.items) == 10, was_loaded=was_loaded)

    async def ask_all(self, names: Sequence[str]) -> list[LocalAnswer]:
        """Request these names, two at a time."""
        waiting = iter(names)

        async def caller() -> list[LocalAnswer]:
            return [await self.ask(name) for name in waiting]

        return [answer for some in await asyncio.gather(*(caller() for _ in range(_NUM_AT_ONCE))) for answer in some]

    async def ask_at(self, names: Sequence[str], rate_rps: float) -> list[LocalAnswer]:
        """Request these names at random times of this mean rate: at equal distances polls would meet all or none."""
        asked, at_s = [], time.monotonic()
        for name, pause_s in zip(names, self._random.exponential(1 / rate_rps, len(names)), strict=True):
            await asyncio.sleep(max(0.0, (at_s := at_s + pause_s) - time.monotonic()))
            asked.append(asyncio.create_task(self.ask(name)))
        return await asyncio.gather(*asked)

    def loads(self) -> Counter[str]:
        """Return how often the gateway has loaded each name."""
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        loads = {
            sample.labels["name"]: int(sample.value)
            for sample in samples
            if sample.name == "tailrace_model_loads_total"
        }
        return Counter(loads)

    def total(self, metric: str) -> float:
        """Return the sum of a metric over all labels."""
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == metric)

    def resident(self) -> list[str]:
        """Return the names in memory."""
        return [live.name for live in self.plane.names.loaded]

    async def until_read(self) -> None:
        """Wait until the manifests of all names were read."""
        for _ in range(_MAX_LOOKS):
            if self.plane.names.has_read_manifests:
                return
            await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def gateway(
    url: str, cache: Path, names: Sequence[str], room: int | None, min_stay_s: float = 0.0
) -> AsyncIterator[MeasuredPlane]:
    """Yield a started gateway with memory for `room` names, besides the first; None loads all at the start."""
    store, registry, items = BundleStore(ObjectStorage(url, cache, 2**30)), CollectorRegistry(), LiveItems()
    residency = None
    if room is not None:
        budget = (room + 1) * await asyncio.to_thread(_bundle_bytes, url, cache.with_name("sized"), names[0])
        residency = NameResidency(budget_bytes=budget, min_stay_s=min_stay_s, pinned=frozenset())
    plane = plane_over(store, names, registry, items=items, residency=residency, bundle_poll_s=_POLL_S)
    began_s = time.monotonic()
    await plane.start()
    start_s = time.monotonic() - began_s
    freeze_start()  # as a gateway does
    try:
        yield MeasuredPlane(plane, registry, items, start_s)
    finally:
        await plane.stop()


def _bundle_bytes(url: str, cache: Path, name: str) -> int:
    """Return the memory of one bundle, from a cache of its own, which no fault empties."""
    return memory_of(BundleStore(ObjectStorage(url, cache, 2**30)).named(name).live()).total


async def measure(
    url: str, folder: Path, num_names: int, room: int, num_requests: int, num_cycles: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield the rows."""
    names = [f"name-{number}" for number in range(num_names)]
    publish_many(url, names, folder)
    async with gateway(url, folder / "one", names[:1], None) as single:
        yield {"row": "one name", "start_s": single.start_s, **latency(await single.ask_all(names[:1] * num_requests))}
    with wire_to_store() as wire:
        async with gateway(url, folder / "many", names, room) as many:
            yield {"row": "start", "names": num_names, "start_s": many.start_s, "one_start_s": single.start_s}
            yield await by_zipf(many, names, num_requests)
            yield await first_calls(many, names[-1])
            await many.until_read()
            yield await cycles(many, names[1 : 4 * room], num_cycles)
            faults = StoreFaults(url, wire, folder / "many")
            for fault in FAULTS:
                yield await under(fault, faults, many, names, room)


def latency(answers: Sequence[LocalAnswer]) -> dict[str, float]:
    """Return the number of requests, and p50 and p99 in milliseconds."""
    times_ms = [answer.ms for answer in answers] or [0.0]
    return {"requests": len(answers), "p50_ms": percentile(times_ms, 0.5), "p99_ms": percentile(times_ms, 0.99)}


def outcome(answers: Sequence[LocalAnswer]) -> dict[str, Any]:
    """Return the fractions of requests that were answered, and answered in their deadline, and the errors."""
    in_time = [answer.is_answered and answer.ms <= DEADLINE_MS for answer in answers]
    return {
        "answered": float(np.mean([answer.is_answered for answer in answers])) if answers else 1.0,
        "in_time": float(np.mean(in_time)) if answers else 1.0,
        **({"errors": dict(errors)} if (errors := Counter(answer.error for answer in answers if answer.error)) else {}),
    }


def drawn(names: Sequence[str], num_requests: int, seed: int) -> list[str]:
    """Return names by Zipf's law with exponent 1."""
    indices = np.random.default_rng(seed).choice(len(names), num_requests, p=zipf_shares(len(names), 1.0))
    return [names[index] for index in indices]


async def by_zipf(many: MeasuredPlane, names: Sequence[str], num_requests: int) -> dict[str, Any]:
    """Request names by Zipf's law as fast as two callers can."""
    answers = await many.ask_all(drawn(names, num_requests, seed=0))
    return {
        "row": "zipf",
        "requests": num_requests,
        "cold": sum(not answer.is_warm for answer in answers),
        **outcome(answers),
        "loads": many.total("tailrace_model_loads_total"),
        "evictions": many.total("tailrace_model_evictions_total"),
    }


async def first_calls(many: MeasuredPlane, name: str) -> dict[str, Any]:
    """Request an absent name many times at once."""
    answers = await asyncio.gather(*(many.ask(name) for _ in range(_NUM_FIRST_CALLS)))
    await until_loaded(many, name)
    return {"row": "first calls", "calls": len(answers), "loads": many.loads()[name], **outcome(answers)}


async def measure_import(url: str, folder: Path, num_names: int, room: int) -> AsyncIterator[dict[str, Any]]:
    """Yield the row of an import: new items as fast as they can be applied, while names in memory are requested.

    Before it, all names were requested, so that the popular items of absent names are ready.
    """
    names = [f"name-{number}" for number in range(num_names)]
    await asyncio.to_thread(folder.mkdir)
    await asyncio.to_thread(publish_many, url, names, folder)
    async with gateway(url, folder / "many", names, room) as many:
        await many.ask_all(names)
        await asyncio.sleep(_SETTLED_S)
        resident = list(islice(cycle(many.resident()), _NUM_IMPORTED_CALLS))
        before = await many.ask_at(resident, RATE_RPS)
        applying = asyncio.create_task(asyncio.to_thread(_apply_import, many.items))
        meanwhile = await many.ask_at(resident, RATE_RPS)
        yield {"row": "import", "items": _NUM_IMPORTED, "resident": len(many.resident()), **await applying} | {
            "p99_ms_before": latency(before)["p99_ms"],
            "p99_ms": latency(meanwhile)["p99_ms"],
            **outcome(meanwhile),
        }


def _apply_import(items: LiveItems) -> dict[str, float]:
    """Apply the states of new items as the reader of the topic does, and return its CPU seconds and duration."""
    states = [
        ItemState(
            item_id=f"new-{number}",
            title=f"Title {number}",
            categories=("a", "b"),
            attributes={"brand": f"brand {number % 50}", "price": float(number)},
        )
        for number in range(_NUM_IMPORTED)
    ]
    began_s, cpu_s = time.monotonic(), time.thread_time()
    for first in range(0, _NUM_IMPORTED, _RECORDS_AT_ONCE):
        items.apply((state.item_id, state) for state in states[first : first + _RECORDS_AT_ONCE])
    return {"cpu_s": time.thread_time() - cpu_s, "seconds": time.monotonic() - began_s}


async def until_loaded(many: MeasuredPlane, name: str) -> bool:
    """Request a name until its bundle answers; return whether it did."""
    for _ in range(_MAX_LOOKS):
        if (await many.ask(name)).is_warm and many.plane.names.of(name).is_loaded:
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def under(
    fault: str, faults: StoreFaults, many: MeasuredPlane, names: Sequence[str], room: int
) -> dict[str, Any]:
    """Repeat the rows during a fault: names in memory, names never asked for, 100 first calls, starts on this cache.

    After the fault, wait until the first-called name is loaded.
    """
    await asyncio.sleep(_SETTLED_S)
    loaded = many.loads()
    unused = [name for name in reversed(names) if not loaded[name]]
    cold, first = unused[:_NUM_FAULT_CALLS], unused[_NUM_FAULT_CALLS]
    resident = list(islice(cycle(many.resident()), 2 * _NUM_FAULT_CALLS))
    before, evictions = _rss(), many.total("tailrace_model_evictions_total")
    with faults.happening(fault):
        warm_ms = latency(await many.ask_at(resident, RATE_RPS))["p99_ms"]
        answers = await many.ask_all(cold)
        calls = await asyncio.gather(*(many.ask(first) for _ in range(_NUM_FIRST_CALLS)))
        growth = _rss() / before - 1
        one_start_s, _ = await _restarted(faults, names[:1], room)
        start_s, restarted = await _restarted(faults, names, room)
    began_s = time.monotonic()
    is_back = await until_loaded(many, first)
    return {
        "row": "fault",
        "fault": fault,
        "warm_p99_ms": warm_ms,
        "cold": len(answers),
        **outcome(answers),
        "first_calls": {"loads": many.loads()[first], **outcome(calls)},
        "start_s": start_s,
        "one_start_s": one_start_s,
        "restarted": outcome(restarted),
        "loads_after": is_back,
        "back_s": time.monotonic() - began_s,
        "evictions": many.total("tailrace_model_evictions_total") - evictions,
        "growth": growth,
    }


async def _restarted(faults: StoreFaults, names: Sequence[str], room: int) -> tuple[float, list[LocalAnswer]]:
    """Return the seconds of another gateway's start on the same cache, and its answers for the first names."""
    async with gateway(faults.url, faults.cache, names, room) as again:
        return again.start_s, await again.ask_all(list(islice(cycle(names[:_NUM_RESTARTED_CALLS]), 100)))


async def cycles(many: MeasuredPlane, names: Sequence[str], num_cycles: int) -> dict[str, Any]:
    """Load names in turn, each displacing another, and compare the memory of the process."""
    memory, began = [(0, _rss())], many.total("tailrace_model_evictions_total")
    while memory[-1][0] < num_cycles and len(memory) <= num_cycles:
        for name in names:
            await many.ask(name)
        memory.append((int(many.total("tailrace_model_evictions_total") - began), _rss()))
    first = next((rss for evictions, rss in memory if evictions >= num_cycles / 4), memory[-1][1])
    return {
        "row": "cycles",
        "evictions": memory[-1][0],
        "rss_after_quarter_mib": first / _MIB,
        "rss_mib": memory[-1][1] / _MIB,
        "growth": memory[-1][1] / first - 1,
    }


def _rss() -> int:
    """Return the bytes of this process's memory, without garbage."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)
