"""Time until a hidden item disappears from every answer of every gateway and tier.

    python -m benchmarks.freshness hides --json OUT [--changes 1000] [--faults 100] [--rate 50] [--up]

    hide                  one item after another is hidden, under `--rate` recommendations a second at both doors
    hide_redis_kill       the same with `--faults` changes, the store killed at the first
    hide_worker_takeover  the same, the worker killed at the first

Time counts from the acknowledgement. Three callers ask: at both doors through the edge, and at the standby. A change
ends when the first answer of their final run without the item is sent. `num_shown_after_1s` counts answers, background
included, that were requested a second or more after the acknowledgement and contain the item. The callers ask for users
of each tier in turn, and the item is the first of that user's answer. Uses the running stack; `--up` starts a stack,
which the faults need.
"""

import asyncio
import json
import sys
import time
from asyncio import TaskGroup
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from benchmarks.faults.processes import StackProcesses
from benchmarks.freshness.answers import background_load
from benchmarks.load.audience import TIERS, Audience
from benchmarks.load.clients import DoorClient, GrpcClient, RequestFields, RestClient, path_of
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.open_loop import RequestOutcome, Send, percentiles
from benchmarks.load.own_stack import parse_for_stack, ready_stack, stack_for
from infra.local.supervisor.ports import of_running_stack
from services.settings.settings import Settings, load_settings

_K = 20
_DEADLINE_MS = 1_000
_NUM_WITHOUT = 6
"""Consecutive answers without the item that end a change, per caller.

With two gateways this misses a stale gateway once in 64 changes, which the background load then shows."""
_PAUSE_S = 0.005
_GIVE_UP_S = 10.0
_HIDDEN_S = 5.0
_LATE_S = 1.0
Ask = Callable[[RequestFields], Awaitable[set[str] | None]]
"""Calls a door, and returns the items of its answer, None for a refusal."""


def main() -> None:
    """Measure, print lines, write the JSON."""
    settings = load_settings()
    parser = report_parser(__doc__ or "")
    parser.add_argument("--changes", type=at_least_one, default=1_000, help="items hidden one after another")
    parser.add_argument("--faults", type=int, default=100, help="items hidden around each fault; 0: no faults")
    parser.add_argument("--rate", type=above_zero, default=50.0, help="background recommendations a second")
    options = parse_for_stack(parser, settings)
    if options.faults and not options.up:
        sys.exit("error: faults kill parts of the stack; give --up for one of your own, or --faults 0")
    report = about_run("freshness hides") | {"background_rps": options.rate}
    parts = {"hide_redis_kill": "store", "hide_worker_takeover": "worker"} if options.faults else {}
    with stack_for(settings, is_started=options.up):
        settings = of_running_stack(settings)
        report["hide"] = asyncio.run(measure_hides(settings, options.url, options.changes, options.rate))
        for name, part in parts.items():
            report[name] = asyncio.run(measure_hides(settings, options.url, options.faults, options.rate, part))
    write_report(options.json, report)


@dataclass(slots=True)
class _Hidden:
    """The times at which an item's hiding was acknowledged, and its showing was requested."""

    acknowledged_s: float
    shown_again_s: float = float("inf")


@dataclass(slots=True)
class Sightings:
    """Every answer's items compared with the items hidden when it was requested."""

    hidden: dict[str, list[_Hidden]] = field(default_factory=dict)
    num_answers: int = 0
    num_refused: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    num_late: int = 0

    def look(self, item_ids: set[str], tier: str, asked_s: float, answered_s: float) -> None:
        """Count an answer, and its items that had been hidden for a second when it was requested."""
        self.num_answers += 1
        self.tiers[tier] += 1
        for item_id in item_ids & self.hidden.keys():
            self.num_late += sum(
                item.acknowledged_s + _LATE_S <= asked_s and answered_s < item.shown_again_s
                for item in self.hidden[item_id]
            )

    async def ask(self, door: DoorClient, ask: RequestFields) -> set[str] | None:
        """Call a door; return the items of its answer, None for a refusal."""
        asked_s = time.perf_counter()
        outcome = await door.recommend(ask)
        if not outcome.is_ok:
            self.num_refused += 1
            return None
        item_ids = set(outcome.item_ids)
        self.look(item_ids, outcome.tier, asked_s, time.perf_counter())
        return item_ids


async def measure_hides(
    settings: Settings, address: tuple[str, int], num_changes: int, rate_rps: float, killed: str = ""
) -> dict[str, Any]:
    """Hide items one after another; return the times until they disappeared, and their impressions after a second.

    After a tenth of the items, the part `killed` is killed; its supervisor restarts it.
    """
    seen, gone_ms = Sightings(), list[float]()
    standby_address = (settings.inner_host, settings.standby_http_port)
    async with (
        ready_stack(address) as (rest, audience),
        GrpcClient(settings.grpc_address) as rpc,
        RestClient(*standby_address) as standby,
    ):
        doors = [partial(seen.ask, door) for door in (rest, rpc, standby)]
        async with background_load(_asks_of_all(doors, audience), rate_rps), TaskGroup() as later:
            for number in range(num_changes):
                if number == num_changes // 10 and killed:
                    StackProcesses(settings.state_dir).kill(killed)
                gone_ms.append(1_000 * await _hide(rest, doors, audience, number, seen, later))
    latency = percentiles(gone_ms, 50, 99, 100)
    about = {"num_changes": num_changes, **latency, "num_shown_after_1s": seen.num_late}
    print(f"{num_changes} items hidden: gone after p50 {latency['p50_ms']} ms, p99 {latency['p99_ms']} ms; ", end="")
    print(f"{seen.num_late} of {seen.num_answers} answers show one after a second")
    return about | {"num_answers": seen.num_answers, "num_refused": seen.num_refused, "tiers": dict(seen.tiers)}


async def _hide(
    rest: RestClient, doors: Sequence[Ask], audience: Audience, number: int, seen: Sightings, later: TaskGroup
) -> float:
    """Hide the first item of an answer; return the seconds until no door returns it. Shows it again later."""
    asks = audience.asks(TIERS[number % len(TIERS)]) or audience.asks("popular")
    assert asks is not None, "`popular` needs no known user"
    ask = {**asks(number), "k": _K, "deadline_ms": _DEADLINE_MS}
    item_id = await _first_item(rest, ask)
    acknowledged_s = await _put(rest, item_id, {"available": False})
    hidden = _Hidden(acknowledged_s)
    seen.hidden.setdefault(item_id, []).append(hidden)
    gone_s = max(await asyncio.gather(*(_gone_s(door, ask, item_id, acknowledged_s) for door in doors)))
    later.create_task(_show_again(rest, item_id, hidden))
    return gone_s - acknowledged_s


async def _first_item(rest: RestClient, ask: RequestFields) -> str:
    deadline_s = time.perf_counter() + _GIVE_UP_S
    while time.perf_counter() < deadline_s:
        if items := (await rest.recommend(ask)).item_ids:
            return items[0]
        await asyncio.sleep(_PAUSE_S)
    sys.exit(f"error: no answer within {_GIVE_UP_S:g} s")


async def _put(rest: RestClient, item_id: str, fields: dict[str, Any]) -> float:
    """Put an item's state until it is accepted; return the time of the acknowledgement."""
    deadline_s = time.perf_counter() + _GIVE_UP_S
    while time.perf_counter() < deadline_s:
        status, _ = await rest.call(b"PUT", path_of("items", item_id), json.dumps(fields).encode())
        if status == 200:
            return time.perf_counter()
        await asyncio.sleep(_PAUSE_S)
    sys.exit(f"error: item {item_id} was refused for {_GIVE_UP_S:g} s")


async def _gone_s(door: Ask, ask: RequestFields, item_id: str, acknowledged_s: float) -> float:
    """Return the time at which the first of the final answers without the item was requested."""
    first_without_s, num_without = acknowledged_s, 0
    while num_without < _NUM_WITHOUT:
        asked_s = time.perf_counter()
        if asked_s > acknowledged_s + _GIVE_UP_S:
            sys.exit(f"error: item {item_id} was shown for {_GIVE_UP_S:g} s")
        items = await door(ask)
        if items is None or item_id in items:
            num_without = 0 if items is not None else num_without
        else:
            first_without_s = asked_s if num_without == 0 else first_without_s
            num_without += 1
        await asyncio.sleep(_PAUSE_S)
    return max(acknowledged_s, first_without_s)


async def _show_again(rest: RestClient, item_id: str, hidden: _Hidden) -> None:
    await asyncio.sleep(_HIDDEN_S)
    hidden.shown_again_s = time.perf_counter()
    await _put(rest, item_id, {})


def _asks_of_all(doors: Sequence[Ask], audience: Audience) -> Send:
    """Return a sender to both doors and the standby for users of every tier."""
    numbers = count()

    async def send(_number: int) -> RequestOutcome:
        number = next(numbers)
        await doors[number // len(TIERS) % len(doors)]({**audience.mixed(number), "k": _K, "deadline_ms": _DEADLINE_MS})
        return RequestOutcome(is_ok=True, tier="", reason="")

    return send
