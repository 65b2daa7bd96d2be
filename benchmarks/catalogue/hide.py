"""Hides items of a running stack one after another, and looks at every answer meanwhile."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc

from benchmarks.load.audience import TIERS, Audience, find_audience
from benchmarks.load.clients import RequestFields, RestClient
from benchmarks.load.open_loop import RequestOutcome, percentile, run_load
from infra.local.supervisor.processes import process_tree
from infra.local.supervisor.stackfile import StackFile
from services.contracts import recommend_pb2 as pb
from services.contracts import recommend_pb2_grpc as api
from services.settings.settings import Settings

_K = 20
_DEADLINE_MS = 1_000
_NUM_WITHOUT = 6
"""So many answers in a row without the item end a change, of each asker: with two gateways one in 64 misses an old one, which the background then shows."""
_PAUSE_S = 0.005
_GIVE_UP_S = 10.0
_HIDDEN_S = 5.0
_LATE_S = 1.0


@dataclass(slots=True)
class _Hidden:
    """When an item's hiding was acknowledged, and when it was asked to be shown again."""

    acknowledged_s: float
    shown_again_s: float = float("inf")


@dataclass(slots=True)
class Sightings:
    """Every answer's items against what was hidden when it was asked for."""

    hidden: dict[str, list[_Hidden]] = field(default_factory=dict)
    num_answers: int = 0
    num_refused: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    num_late: int = 0

    def look(self, item_ids: set[str], tier: str, asked_s: float, answered_s: float) -> None:
        """Count an answer, and its items that had been hidden for a second when it was asked for."""
        self.num_answers += 1
        self.tiers[tier] += 1
        for item_id in item_ids & self.hidden.keys():
            self.num_late += sum(
                one.acknowledged_s + _LATE_S <= asked_s and answered_s < one.shown_again_s
                for one in self.hidden[item_id]
            )


class Fault:
    """A part of the stack that is killed; its supervisor starts it again."""

    def __init__(self, settings: Settings, part: str) -> None:
        self._stack = StackFile(settings.state_dir)
        self._part = part

    def strike(self) -> None:
        """Kill it."""
        record = self._stack.read()
        tree = process_tree(record.parts.get(self._part) if record else None)
        if not tree:
            sys.exit(f"error: no {self._part} runs")
        os.kill(tree[0].pid, signal.SIGKILL)


class _Askers:
    """The doors that are asked: REST and gRPC through the edge, and the standby."""

    def __init__(self, rest: RestClient, standby: RestClient, rpc: Any, seen: Sightings) -> None:
        self._rest = rest
        self._standby = standby
        self._rpc = rpc
        self._seen = seen
        self.ask = {"rest": self._ask_rest, "grpc": self._ask_rpc, "standby": self._ask_standby}

    async def _ask_rest(self, ask: RequestFields) -> set[str] | None:
        return await self._over_http(self._rest, ask)

    async def _ask_standby(self, ask: RequestFields) -> set[str] | None:
        return await self._over_http(self._standby, ask)

    async def _over_http(self, door: RestClient, ask: RequestFields) -> set[str] | None:
        asked_s = time.perf_counter()
        status, body = await door.call(b"POST", b"/v1/recommendations", json.dumps(ask).encode())
        if status != 200:
            self._seen.num_refused += 1
            return None
        answer = json.loads(body)
        return self._looked({item["item_id"] for item in answer["items"]}, answer["tier"], asked_s)

    async def _ask_rpc(self, ask: RequestFields) -> set[str] | None:
        asked_s = time.perf_counter()
        try:
            answer = await self._rpc.Recommend(pb.RecommendRequest(**ask))
        except grpc.aio.AioRpcError:
            self._seen.num_refused += 1
            return None
        return self._looked({item.item_id for item in answer.items}, answer.tier, asked_s)

    def _looked(self, item_ids: set[str], tier: str, asked_s: float) -> set[str]:
        self._seen.look(item_ids, tier, asked_s, time.perf_counter())
        return item_ids


async def measure_hides(
    settings: Settings, address: tuple[str, int], num_changes: int, rate_rps: float, fault: Fault | None = None
) -> dict[str, Any]:
    """Hide so many items, one after another, and return the times until they were gone, and what was seen of them after a second."""
    seen, gone_ms = Sightings(), list[float]()
    standby_address = (settings.inner_host, settings.standby_http_port)
    async with RestClient(*address) as rest, RestClient(*standby_address) as standby:
        audience = await find_audience(rest)
        async with grpc.aio.insecure_channel(settings.grpc_address) as channel:
            askers = _Askers(rest, standby, api.RecommenderStub(channel), seen)  # type: ignore[no-untyped-call]
            background = asyncio.create_task(_background(askers, audience, rate_rps))
            again: set[asyncio.Task[None]] = set()
            try:
                for number in range(num_changes):
                    if fault is not None and number == num_changes // 10:
                        fault.strike()
                    gone_ms.append(1_000 * await _hide(rest, askers, audience, number, seen, again))
            finally:
                await asyncio.gather(*again)
                background.cancel()
    found = {f"p{share}_ms": round(percentile(gone_ms, share / 100), 3) for share in (50, 99, 100)}
    about = {"num_changes": num_changes, **found, "num_shown_after_1s": seen.num_late}
    print(f"{num_changes} items hidden: gone after p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms; ", end="")
    print(f"{seen.num_late} of {seen.num_answers} answers show one after a second")
    return about | {"num_answers": seen.num_answers, "num_refused": seen.num_refused, "tiers": dict(seen.tiers)}


async def _hide(
    rest: RestClient,
    askers: _Askers,
    audience: Audience,
    number: int,
    seen: Sightings,
    again: set[asyncio.Task[None]],
) -> float:
    """Hide the first item of an answer; return the seconds until no door has it any more. It is shown again after some seconds."""
    asks = audience.asks(TIERS[number % len(TIERS)]) or audience.asks("popular")
    assert asks is not None, "`popular` needs no known user"
    ask = {**asks(number), "k": _K, "deadline_ms": _DEADLINE_MS}
    item_id = await _first_item(rest, ask)
    acknowledged_s = await _put(rest, item_id, {"available": False})
    hidden = _Hidden(acknowledged_s)
    seen.hidden.setdefault(item_id, []).append(hidden)
    gone_s = max(await asyncio.gather(*(_gone_s(one, ask, item_id, acknowledged_s) for one in askers.ask.values())))
    task = asyncio.create_task(_show_again(rest, item_id, hidden))
    again.add(task)
    task.add_done_callback(again.discard)
    return gone_s - acknowledged_s


async def _first_item(rest: RestClient, ask: RequestFields) -> str:
    deadline_s = time.perf_counter() + _GIVE_UP_S
    while time.perf_counter() < deadline_s:
        status, body = await rest.call(b"POST", b"/v1/recommendations", json.dumps(ask).encode())
        if status == 200 and (items := json.loads(body)["items"]):
            return str(items[0]["item_id"])
        await asyncio.sleep(_PAUSE_S)
    sys.exit(f"error: no answer within {_GIVE_UP_S:g} s")


async def _put(rest: RestClient, item_id: str, fields: dict[str, Any]) -> float:
    """Put an item's state until it is accepted; return when that was acknowledged."""
    deadline_s = time.perf_counter() + _GIVE_UP_S
    while time.perf_counter() < deadline_s:
        status, _ = await rest.call(b"PUT", f"/v1/items/{item_id}".encode(), json.dumps(fields).encode())
        if status == 200:
            return time.perf_counter()
        await asyncio.sleep(_PAUSE_S)
    sys.exit(f"error: item {item_id} was refused for {_GIVE_UP_S:g} s")


async def _gone_s(ask_door: Any, ask: RequestFields, item_id: str, acknowledged_s: float) -> float:
    """Return when the first of the last answers without the item was asked for."""
    first_without_s, num_without = acknowledged_s, 0
    while num_without < _NUM_WITHOUT:
        asked_s = time.perf_counter()
        if asked_s > acknowledged_s + _GIVE_UP_S:
            sys.exit(f"error: item {item_id} was shown for {_GIVE_UP_S:g} s")
        items = await ask_door(ask)
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


async def _background(askers: _Askers, audience: Audience, rate_rps: float) -> None:
    """Ask both doors and the standby for users of every tier at a fixed rate, until cancelled."""
    mixed, numbers, doors = audience.asks("mixed"), count(), list(askers.ask.values())
    assert mixed is not None, "`popular` needs no known user"

    async def send(_number: int) -> RequestOutcome:
        number = next(numbers)
        await doors[number // len(TIERS) % len(doors)]({**mixed(number), "k": _K, "deadline_ms": _DEADLINE_MS})
        return RequestOutcome(is_ok=True, tier="", reason="")

    while True:
        await run_load(send, rate_rps, num_requests=1_000)
