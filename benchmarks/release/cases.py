"""Releases under load at both doors: worse versions are rolled back, equal versions promoted, no losses.

Simulated users look at an item, get a list, and click in one of ten, or fewer if the version is worse.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.load.clients import GrpcClient, RestClient
from benchmarks.load.open_loop import Load, RequestOutcome, run_load
from benchmarks.load.table import show
from models.registry.canary import CanaryStage
from models.registry.store import BundleStore
from services.settings.settings import Settings

CLICKS = 0.1
REFUSED = "refused"
"""The reason of a request that was refused for overload, with the time to retry."""
_OVERLOADED = ("http_429", "resource_exhausted")
_K = 10


@dataclass
class SimulatedUsers:
    """The users, the items they look at, and `liking`: the factor on clicks by version."""

    rest: RestClient
    rpc: GrpcClient
    users: Sequence[str]
    items: Sequence[str]
    liking: Mapping[str, float] = field(default_factory=dict)
    has_clicks: bool = True
    lost: Counter[str] = field(default_factory=Counter)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self, rate: float, seconds: float) -> Load:
        """Send that load, half of it to each door."""
        return await run_load(self._ask, rate, max(1, round(rate * seconds)))

    async def _ask(self, number: int) -> RequestOutcome:
        fields = {"user_id": self.draw.choice(self.users), "k": _K, "recent_item_ids": [self.draw.choice(self.items)]}
        outcome = await (self.rpc if number % 2 else self.rest).recommend(fields)
        if not outcome.is_ok:
            if outcome.reason.startswith(_OVERLOADED):
                return replace(outcome, reason=REFUSED)
            self.lost[outcome.reason[:120]] += 1
            return replace(outcome, reason="lost")
        liking = self.liking.get(outcome.bundle_version, 1.0)
        if self.has_clicks and outcome.item_ids and self.draw.random() < CLICKS * liking:
            await self._click(str(fields["user_id"]), self.draw.choice(outcome.item_ids), outcome.request_id)
        return outcome

    async def _click(self, user_id: str, item_id: str, request_id: str) -> None:
        now_ms = time.time_ns() // 1_000_000
        event = {"user_id": user_id, "item_id": item_id, "event_time_ms": now_ms, "request_id": request_id}
        await self.rest.call(b"POST", b"/v1/events", json.dumps(event).encode())


HALF = 0.5
_GIVE_UP_S = 900.0
_SLICE_S = 5.0
_AWAY_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseCase:
    """A release: its name in the report, version, stage duration, budgets, and whether users click."""

    name: str
    candidate: str
    hold_s: float
    liking: float = 1.0
    has_clicks: bool = False


CASES = (
    ReleaseCase(name="worse latency", candidate="slow", hold_s=600),
    ReleaseCase(name="1 % of calls fail", candidate="failing", hold_s=600),
    ReleaseCase(name="20 % fewer clicks", candidate="fewer-clicks", hold_s=900, liking=0.8, has_clicks=True),
    ReleaseCase(name="equal", candidate="equal", hold_s=120),
)


async def run_case(
    case: ReleaseCase, version: str, store: BundleStore, settings: Settings, audience: SimulatedUsers, rate: float
) -> dict[str, Any]:
    """Begin the release, keep the load up until it has ended, and return its outcome."""
    audience.liking, audience.has_clicks = {version: case.liking}, case.has_clicks
    lead_ms = round(settings.release_lead_s * 1_000)
    since_ms = time.time_ns() // 1_000_000 + lead_ms
    await asyncio.to_thread(store.release, version, (CanaryStage(HALF, case.hold_s),), since_ms, by="benchmark")
    row = await _under_load(audience, rate, lambda: _ended(store), f"{case.name}: ")
    record = store.record()
    withdrawn = record.withdrawn.get(version)
    after_s = round(time.time() - since_ms / 1_000 - row.pop("tail_s"), 1)
    report = {
        "name": case.name,
        "rolled_back_after_s": after_s if withdrawn is not None else None,
        "live_after_s": after_s if record.live == version else None,
        "reason": withdrawn.reason if withdrawn is not None else "",
        **row,
    }
    show(report, "name", "rolled_back_after_s", "live_after_s", "num_lost", "reason")
    if record.canary is not None:
        store.end_canary(version, by="benchmark", note="no result in time")
    return report


async def run_moves(
    version: str, store: BundleStore, settings: Settings, audience: SimulatedUsers, rate: float
) -> dict[str, Any]:
    """Promote, roll back, and make the store of names unavailable during a release, under load."""
    audience.liking, audience.has_clicks = {}, False
    before = store.live_version()

    async def move() -> bool:
        await asyncio.to_thread(store.promote, version, by="benchmark")
        await asyncio.sleep(_SLICE_S)
        await asyncio.to_thread(store.rollback, before, by="benchmark", reason="as a benchmark")
        await asyncio.sleep(_SLICE_S)
        since_ms = time.time_ns() // 1_000_000 + round(settings.release_lead_s * 1_000)
        await asyncio.to_thread(_release_any, store, since_ms)
        await asyncio.sleep(settings.release_lead_s + _SLICE_S)
        await _without_store(settings.bundle_root)
        await asyncio.sleep(_SLICE_S)
        return True

    moving = asyncio.ensure_future(move())
    row = await _under_load(audience, rate, moving.done, "moves: ")
    await moving
    row.pop("tail_s")
    if (canary := store.record().canary) is not None:
        store.end_canary(canary.version, by="benchmark", note="measured")
    report = {"name": "promotion, rollback, store outage", "rolled_back_after_s": None, **row}
    show(report, "name", "num_lost", "num_requests")
    return report


def _release_any(store: BundleStore, since_ms: int) -> None:
    """Release a version that is neither live nor withdrawn."""
    record = store.record()
    free = [version for version in store.versions() if version not in {record.live, *record.withdrawn}]
    store.release(free[-1], (CanaryStage(HALF, 3_600.0),), since_ms, by="benchmark", by_hand=True)


async def _without_store(root: Path) -> None:
    """Move the folder of names away for a while, like an unmounted share."""
    names, hidden = root / "names", root.with_name("names-away")
    names.rename(hidden)
    names.write_text("not a folder")
    await asyncio.sleep(_AWAY_S)
    names.unlink()
    hidden.rename(names)


def _ended(store: BundleStore) -> bool:
    return store.record().canary is None


async def _under_load(audience: SimulatedUsers, rate: float, is_over: Callable[[], bool], what: str) -> dict[str, Any]:
    """Keep the load up, in slices of some seconds, until it is over plus one slice."""
    audience.lost = Counter()
    started_s, over_s = time.monotonic(), None
    reasons: Counter[str] = Counter()
    num_requests = 0
    while over_s is None or time.monotonic() - over_s < _SLICE_S:
        load = await audience.run(rate, _SLICE_S)
        num_requests += len(load.shots)
        reasons.update(shot.outcome.reason for shot in load.shots)
        if over_s is None and (is_over() or time.monotonic() - started_s > _GIVE_UP_S):
            over_s = time.monotonic()
    num_lost = sum(audience.lost.values()) + reasons["not_sent"] + reasons["no_answer"]
    if num_lost:
        print(what, dict(audience.lost), flush=True)
    return {
        "tail_s": time.monotonic() - over_s,
        "num_requests": num_requests,
        "num_lost": num_lost,
        "lost": dict(audience.lost),
        "num_refused": reasons[REFUSED],
        "reasons": dict(reasons),
    }
