"""Measures how soon an erasure takes effect: one user at a time under load, and many users at once.

    python -m benchmarks.freshness erasures --json OUT [--erasures 100] [--many 10000] [--rate 20] [--url ...] [--up]

    one    a new user's event is visible, the user is erased, and answers are requested until an answer has no event of
           the user
    many   new users with an event each are erased as fast as the door accepts; then their receipts are read until all
           are done online, and done in every store

Times count from the acknowledgement of the erasure, for `many` of the last erasure. The background load is
that of benchmarks.freshness. Uses the running stack; `--up` starts one and stops it afterwards.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from benchmarks.freshness.answers import answered, asks_and_clicks, background_load
from benchmarks.load.clients import RestClient, path_of
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.open_loop import percentiles
from benchmarks.load.own_stack import parse_for_stack, ready_stack, stack_for
from services.settings.settings import load_settings

_ALL_GIVE_UP_S = 600.0
_AT_ONCE = 16
_EVENTS_PER_REQUEST = 500


def main() -> None:
    """Measure, print lines, write the JSON."""
    settings = load_settings()
    parser = report_parser(__doc__)
    parser.add_argument("--erasures", type=at_least_one, default=100, help="users erased one after another")
    parser.add_argument("--many", type=at_least_one, default=10_000, help="users erased in one go")
    parser.add_argument("--rate", type=above_zero, default=20.0, help="background recommendations a second")
    options = parse_for_stack(parser, settings)
    with stack_for(settings, is_started=options.up):
        report = asyncio.run(_measure(options))
    write_report(options.json, report)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    async with (
        ready_stack(options.url) as (rest, audience),
        background_load(asks_and_clicks(rest, audience), options.rate),
    ):
        gone_ms = [1_000 * await _erase_one(rest, audience.item_ids[0]) for _ in range(options.erasures)]
        alone = percentiles(gone_ms, 50, 99, 100)
        print(f"{options.erasures} erasures, gone after p50 {alone['p50_ms']} ms, p99 {alone['p99_ms']} ms")
        many = await _erase_many(rest, audience.item_ids[0], options.many)
    print(f"{options.many} users: {many}")
    figures = {"one": {"num_erasures": options.erasures, **alone}, "many": {"num_users": options.many, **many}}
    return about_run("freshness erasures") | {"background_rps": options.rate} | figures


async def _erase_one(rest: RestClient, item_id: str) -> float:
    """Return the seconds until an answer has no event of the user. Exits if that never happens."""
    user_id = f"erased-{uuid.uuid4().hex}"
    await _record(rest, [user_id], item_id)
    await answered(rest, user_id, lambda newest_ms: newest_ms is not None)
    await _erase(rest, user_id)
    acknowledged_s = time.perf_counter()
    return await answered(rest, user_id, lambda newest_ms: newest_ms is None) - acknowledged_s


async def _erase_many(rest: RestClient, item_id: str, num_users: int) -> dict[str, float]:
    user_ids = [f"erased-{uuid.uuid4().hex}" for _ in range(num_users)]
    for at in range(0, num_users, _EVENTS_PER_REQUEST):
        await _record(rest, user_ids[at : at + _EVENTS_PER_REQUEST], item_id)
    await answered(rest, user_ids[-1], lambda newest_ms: newest_ms is not None)
    began_s = time.perf_counter()
    erasure_ids = await _side_by_side(user_ids, lambda user_id: _erase(rest, user_id))
    acknowledged_s = time.perf_counter()
    times_s = {"accepted_s": round(acknowledged_s - began_s, 3)}
    for name, field in (("online_s", "is_done_online"), ("all_s", "is_done")):
        left = erasure_ids
        while left:
            receipts = await _side_by_side(left, lambda erasure_id: _receipt(rest, erasure_id))
            left = [erasure_id for erasure_id, receipt in zip(left, receipts, strict=True) if not receipt.get(field)]
            if time.perf_counter() > acknowledged_s + _ALL_GIVE_UP_S:
                sys.exit(f"error: {len(left)} receipts without {field}, such as {receipts[-1]}")
            await asyncio.sleep(0.2)
        times_s[name] = round(time.perf_counter() - acknowledged_s, 3)
    return times_s


async def _record(rest: RestClient, user_ids: list[str], item_id: str) -> None:
    events = [{"user_id": user_id, "item_id": item_id} for user_id in user_ids]
    status, body = await rest.call(b"POST", b"/v1/events", json.dumps({"events": events}).encode())
    if status != 200:
        sys.exit(f"error: events were refused with {status}: {body.decode(errors='replace')}")


async def _erase(rest: RestClient, user_id: str) -> str:
    """Erase a user and return the erasure's id; retried while the gateway refuses."""
    for _ in range(50):
        status, body = await rest.call(b"DELETE", path_of("users", user_id), b"")
        if status == 202:
            return str(json.loads(body)["erasure_id"])
        await asyncio.sleep(0.1)
    sys.exit(f"error: the erasure was refused with {status}: {body.decode(errors='replace')}")


async def _receipt(rest: RestClient, erasure_id: str) -> dict[str, Any]:
    status, body = await rest.call(b"GET", f"/v1/erasures/{erasure_id}".encode(), b"")
    receipt: dict[str, Any] = json.loads(body) if status == 200 else {}
    return receipt


async def _side_by_side(ids: Iterable[str], call: Callable[[str], Awaitable[Any]]) -> list[Any]:
    """Call for each id, several concurrently, and return the results in order."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def limited(value: str) -> Any:
        async with places:
            return await call(value)

    return await asyncio.gather(*(limited(value) for value in ids))
