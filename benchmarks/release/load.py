"""Simulated users at both doors: they look at an item, get a list, and click in one of ten, or fewer if worse."""

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.load.clients import GrpcClient, RestClient
from benchmarks.load.open_loop import Load, RequestOutcome, run_load

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
