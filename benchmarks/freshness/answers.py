"""Waits until an answer changes, and a background load meanwhile."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from benchmarks.load.audience import Audience
from benchmarks.load.clients import RestClient
from benchmarks.load.open_loop import RequestOutcome, Send, run_load

_PAUSE_S = 0.002
_GIVE_UP_S = 60.0


async def answered(rest: RestClient, user_id: str, is_enough: Callable[[int | None], bool]) -> float:
    """Request recommendations until an answer's newest event is as expected; return the time. Exits after a minute."""
    began_s, ask = time.perf_counter(), json.dumps({"user_id": user_id, "k": 1}).encode()
    while time.perf_counter() - began_s < _GIVE_UP_S:
        status, body = await rest.call(b"POST", b"/v1/recommendations", ask)
        seen_s = time.perf_counter()
        if status == 200:
            answer = json.loads(body)
            is_read = answer["reason"] not in {"features_unavailable", "shed"}
            if is_read and is_enough(answer["newest_event_time_ms"]):
                return seen_s
        await asyncio.sleep(_PAUSE_S)
    sys.exit(f"error: the answers to {user_id} did not change within {_GIVE_UP_S:g} s")


@asynccontextmanager
async def background_load(send: Send, rate_rps: float) -> AsyncIterator[None]:
    """Send requests at a fixed rate during the block."""

    async def send_all() -> None:
        while True:
            await run_load(send, rate_rps, num_requests=1_000)

    load = asyncio.create_task(send_all())
    try:
        yield
    finally:
        load.cancel()


def asks_and_clicks(rest: RestClient, audience: Audience) -> Send:
    """Return a sender of requests for known users, with a click for every second one."""
    users = audience.known_user_ids or ("nobody",)

    async def send(number: int) -> RequestOutcome:
        user_id = users[number % len(users)]
        if number % 2:
            now_ms = time.time_ns() // 1_000_000
            click = {"user_id": user_id, "item_id": audience.item_ids[0], "event_time_ms": now_ms}
            await rest.call(b"POST", b"/v1/events", json.dumps(click).encode())
        return await rest.recommend({"user_id": user_id, "k": 10})

    return send
