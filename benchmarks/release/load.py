"""Simulated users at both doors, who look at an item, get a list, and click in one of ten: in fewer of a version that they like less."""

import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.load.clients import RestClient
from benchmarks.load.open_loop import Load, RequestOutcome, run_load
from services.contracts import recommend_pb2 as pb
from services.contracts import recommend_pb2_grpc as api

CLICKS = 0.1
REFUSED = "refused"
"""The reason of a request that was answered with a refusal for overload, which says when to send it again."""
_TOO_MANY = 429
_K = 10


class _Refused(Exception):
    """The stack is overloaded."""


@dataclass
class Audience:
    """Who asks, what they look at, and how they like a version: `liking` is by version the factor of its clicks."""

    rest: RestClient
    rpc: Any
    users: Sequence[str]
    items: Sequence[str]
    liking: Mapping[str, float] = field(default_factory=dict)
    has_clicks: bool = True
    versions: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    async def run(self, rate: float, seconds: float) -> Load:
        """Send that load, half of it to each door."""
        return await run_load(self._ask, rate, max(1, round(rate * seconds)))

    async def _ask(self, number: int) -> RequestOutcome:
        fields = {"user_id": self.draw.choice(self.users), "k": _K, "recent_item_ids": [self.draw.choice(self.items)]}
        try:
            answer = await (self._over_grpc(fields) if number % 2 else self._over_rest(fields))
        except _Refused:
            return RequestOutcome(is_ok=False, tier="none", reason=REFUSED)
        except (OSError, grpc.aio.AioRpcError, ValueError) as error:
            self.lost[repr(error)[:120]] += 1
            return RequestOutcome(is_ok=False, tier="none", reason="lost")
        version, tier, reason, request_id, items = answer
        self.versions[version] += 1
        if self.has_clicks and items and self.draw.random() < CLICKS * self.liking.get(version, 1.0):
            await self._click(str(fields["user_id"]), self.draw.choice(items), request_id)
        return RequestOutcome(is_ok=True, tier=tier, reason=reason)

    async def _over_rest(self, fields: Mapping[str, Any]) -> tuple[str, str, str, str, list[str]]:
        status, body = await self.rest.call(b"POST", b"/v1/recommendations", json.dumps(fields).encode())
        if status == _TOO_MANY:
            raise _Refused
        if status != 200:
            raise OSError(f"status {status}: {body[:80]!r}")
        found = json.loads(body)
        items = [one["item_id"] for one in found["items"]]
        return found["bundle_version"], found["tier"], found["reason"], found["request_id"], items

    async def _over_grpc(self, fields: Mapping[str, Any]) -> tuple[str, str, str, str, list[str]]:
        try:
            found = await self.rpc.Recommend(pb.RecommendRequest(**fields))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise _Refused from error
            raise
        items = [one.item_id for one in found.items]
        return found.bundle_version, found.tier, found.reason, found.request_id, items

    async def _click(self, user_id: str, item_id: str, request_id: str) -> None:
        event = {
            "user_id": user_id,
            "item_id": item_id,
            "event_time_ms": time.time_ns() // 1_000_000,
            "request_id": request_id,
        }
        await self.rest.call(b"POST", b"/v1/events", json.dumps(event).encode())


def stub(channel: grpc.aio.Channel) -> Any:
    """Return the caller of the gRPC door."""
    return api.RecommenderStub(channel)  # type: ignore[no-untyped-call]
