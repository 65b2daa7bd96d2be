"""One soak on a running scene: load, faults, samples and explanation look-ups concurrently, then the account."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console

from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.scene import HOST, Scene
from benchmarks.load.clients import RestClient
from benchmarks.load.open_loop import Shot, run_schedule
from benchmarks.soak.ledger import Account, Explained, account_for
from benchmarks.soak.report import WARM_UP_S, door_rows, growth_rows, promises
from benchmarks.soak.samples import Sample, Sampler
from benchmarks.soak.traffic import Traffic
from services.errors import EnvironmentFault
from services.features.repo import RepoAddress
from services.features.writer import FeatureWriter
from services.stream.aggregate import history_limits
from services.stream.decode import LoggedInteraction
from services.stream.log.offline_log import OfflineLog
from tailrace_client import AsyncClient

SETTINGS = {"history_max_items": 40, "explain_keep_s": 60}
"""Small, so that bounded quantities reach their bound within the warm-up."""
SAMPLE_EVERY_S = 5.0
CALM_S = 20.0
"""Seconds without a fault at the beginning and at the end."""
_SHORTEST_S, _LONGEST_S = 4.0, 10.0
_SLICE_S = 30.0
_SETTLE_S = 60.0
_HIDING = ("store", "gateway", "raylet")
"""Prefixes of faults during which explanations can be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Duration, load and fault frequency; the seed orders the faults. A process's first `warm_up_s` are not growth."""

    total_s: float
    faults: tuple[str, ...]
    rate_rps: float = 25.0
    every_s: float = 45.0
    seed: int = 1
    warm_up_s: float = WARM_UP_S


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault: its name, its start in seconds from the start of the load, and its minimal duration."""

    name: str
    at_s: float
    lasts_s: float


@dataclass(slots=True)
class _Course:
    """Data collected by a run. `began_s` is monotonic.

    A fault's row: seconds from the start, and until the stack was healthy, None if it never was.
    """

    plan: Plan
    console: Console
    began_s: float = field(default_factory=time.monotonic)
    shots: list[Shot] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    explained: Explained = field(default_factory=Explained)
    load_is_over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def troubles_s(self) -> list[tuple[float, float]]:
        """The monotonic seconds during which explanations may be lost."""
        begins_s = [
            (self.began_s + fault["at_s"], fault) for fault in self.faults if fault["fault"].startswith(_HIDING)
        ]
        return [(at_s, at_s + fault["lasted_s"] + (fault["healthy_after_s"] or 0.0)) for at_s, fault in begins_s]


async def soak(scene: Scene, plan: Plan, console: Console) -> dict[str, Any]:
    """Run the plan on a healthy scene, and return the report."""
    await scene.until_healthy()
    course = _Course(plan, console)
    async with AsyncExitStack() as closing:
        text = await closing.enter_async_context(RestClient(HOST, scene.settings.http_port, scene.operator_key))
        traffic = Traffic(scene, text, plan.seed)
        operator = AsyncClient(f"http://{HOST}:{scene.settings.http_port}", api_key=scene.operator_key)
        await closing.enter_async_context(operator)
        async with asyncio.TaskGroup() as group:  # the first error ends them all
            group.create_task(_load(course, traffic))
            group.create_task(_come_and_go(course, scene))
            group.create_task(_sample(course, scene))
            group.create_task(course.explained.read_back(operator, traffic.answered, course.load_is_over))
    account = await _account(scene, traffic)
    return _report(course, scene, account)


async def _load(course: _Course, traffic: Traffic) -> None:
    """Send slice after slice: between two slices the garbage collector may run, and late requests end."""
    num_requests, per_slice = round(course.plan.rate_rps * course.plan.total_s), round(course.plan.rate_rps * _SLICE_S)
    for first in range(0, num_requests, per_slice):
        num = min(per_slice, num_requests - first)
        departures_s = [index / course.plan.rate_rps for index in range(num)]
        course.console.print(f"{100 * first / num_requests:.0f} % of {course.plan.total_s / 60:g} minutes")

        async def send(number: int, first: int = first) -> Any:
            return await traffic.send(first + number)

        done = await run_schedule(send, departures_s)
        course.shots += [replace(shot, number=first + shot.number) for shot in done.shots]
    course.load_is_over.set()


def plan_faults(names: Sequence[str], total_s: float, every_s: float, seed: int) -> list[PlannedFault]:
    """Return a fault every `every_s` seconds, in order; the same for the same seed."""
    draw = random.Random(seed)
    order = _endless(names, draw)
    starts = range(max(0, int((total_s - 2 * CALM_S) // every_s)))
    return [
        PlannedFault(next(order), CALM_S + start * every_s, draw.uniform(_SHORTEST_S, min(_LONGEST_S, every_s / 2)))
        for start in starts
    ]


def _endless(names: Sequence[str], draw: random.Random) -> Iterator[str]:
    while True:
        yield from draw.sample(names, len(names))


async def _come_and_go(course: _Course, scene: Scene) -> None:
    plan = course.plan
    for planned in plan_faults(plan.faults, plan.total_s, plan.every_s, plan.seed):
        await asyncio.sleep(planned.at_s - course.elapsed_s)
        course.faults.append(await _one_fault(course, scene, planned))
        if course.faults[-1]["healthy_after_s"] is None:
            return


async def _one_fault(course: _Course, scene: Scene, planned: PlannedFault) -> dict[str, Any]:
    fault, at_s = FAULTS[planned.name], course.elapsed_s
    await fault.begin(scene)
    if fault.end is not None:
        await asyncio.sleep(planned.lasts_s)
        await fault.end(scene)
    ended_s, healthy_after_s = course.elapsed_s, None
    with suppress(EnvironmentFault):
        await asyncio.sleep(1.0)  # the supervisor needs a moment to notice
        await scene.until_healthy()
        healthy_after_s = round(course.elapsed_s - ended_s, 1)
    times_s = {"at_s": round(at_s, 1), "lasted_s": round(ended_s - at_s, 1), "healthy_after_s": healthy_after_s}
    return {"fault": planned.name, **times_s}


async def _sample(course: _Course, scene: Scene) -> None:
    sampler = Sampler(scene.settings)
    try:
        while not course.load_is_over.is_set():
            course.samples.append(await asyncio.to_thread(sampler.take))
            await asyncio.sleep(SAMPLE_EVERY_S)
    finally:
        sampler.close()


async def _account(scene: Scene, traffic: Traffic) -> Account:
    """Wait a bounded time until all acknowledged events are in the log, then compare log and rows."""
    settings, log = scene.settings, OfflineLog(scene.settings.offline_log_dir)

    def read() -> list[LoggedInteraction]:
        return [record for partition in range(settings.topic_partitions) for record in log.read(partition)]

    def compare(logged: Sequence[LoggedInteraction]) -> Account:
        users = traffic.user_ids
        rows = FeatureWriter(RepoAddress(settings.feature_repo_dir, settings.redis_address)).read_histories(users)
        ours = [record for record in logged if record.interaction.user_id in users]
        return account_for(traffic.ledger, ours, rows, history_limits(settings.history_max_items))

    give_up_s = time.monotonic() + _SETTLE_S
    logged = await asyncio.to_thread(read)
    while traffic.ledger.unlogged(logged) and time.monotonic() < give_up_s:
        await asyncio.sleep(1.0)
        logged = await asyncio.to_thread(read)
    return await asyncio.to_thread(compare, logged)


def _report(course: _Course, scene: Scene, account: Account) -> dict[str, Any]:
    doors = door_rows(course.shots, scene.weights)
    growth = growth_rows(course.samples, course.plan.warm_up_s)
    explained = course.explained.fields(course.troubles_s)
    return {
        "plan": asdict(course.plan),
        "settings": SETTINGS,
        "faults": course.faults,
        "restarts": scene.processes.num_restarts(),
        "doors": doors,
        "events": asdict(account),
        "explained": explained,
        "num_samples": len(course.samples),
        "growth": growth,
        "promises": promises(account, explained, growth, course.faults, doors),
    }
