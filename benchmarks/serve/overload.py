"""Overload: the stack's own capacity, then multiples of it, open loop, by door and priority.

    python -m benchmarks.serve overload --json OUT [--multiples 0.5 1 2 5] [--seconds 5] [--deadline-ms 200]
                                              [--url ...] [--grpc ...]

`--up` starts a stack with a key for each priority and stops it afterwards; otherwise the running stack is called
without a key, which is normal priority. The capacity of a door is the rate of answers in time for closed-loop callers
of normal priority. After the last multiple, the first is measured again five seconds later (`is_after_overload`).
Latency counts from the intended departure. Refusals are counted by the refusing part.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.load.audience import find_audience
from benchmarks.load.clients import DoorClient, GrpcClient, RestClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.keys import write_caller_keys
from benchmarks.load.open_loop import RequestOutcome, Send, percentile, run_load, summary
from benchmarks.load.own_stack import add_stack_options, require_ready, stack_for
from benchmarks.load.table import show
from services.contracts.access import Priority
from services.settings.settings import Settings, load_settings

NUM_CALLERS = 32
PAUSE_S = 5.0
"""Time between cases, in which an overloaded stack must recover."""


def main() -> None:
    """Measure, print a table, write the JSON."""
    settings = load_settings()
    options = _options(settings)
    keys: Mapping[Priority, str] = {Priority.NORMAL: ""}
    with tempfile.TemporaryDirectory() as folder:
        if options.up:
            keys_file = Path(folder) / "keys.json"
            keys = write_caller_keys(keys_file).by_priority
            settings = settings.model_copy(update={"api_keys_file": keys_file})
        with stack_for(settings, is_started=options.up):
            report = asyncio.run(_measure(options, keys))
    write_report(options.json, report)


def _options(settings: Settings) -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--multiples", type=above_zero, nargs="+", default=[0.5, 1.0, 2.0, 5.0], help="of the capacity")
    parser.add_argument("--seconds", type=above_zero, default=5.0, help="per case")
    parser.add_argument("--deadline-ms", type=at_least_one, default=200)
    add_stack_options(parser, settings)
    return parser.parse_args()


async def _measure(options: argparse.Namespace, keys: Mapping[Priority, str]) -> dict[str, Any]:
    rows = []
    async with AsyncExitStack() as closing:
        host, port = options.url
        rest = {one: await closing.enter_async_context(RestClient(host, port, key)) for one, key in keys.items()}
        rpc = {one: await closing.enter_async_context(GrpcClient(options.grpc, key)) for one, key in keys.items()}
        await require_ready(rest[Priority.NORMAL])
        audience = await find_audience(rest[Priority.NORMAL])

        def sender(caller: DoorClient) -> Send:
            def send(number: int) -> Awaitable[RequestOutcome]:
                return caller.recommend({**audience.mixed(number), "deadline_ms": options.deadline_ms})

            return send

        for door, callers in (("rest", rest), ("grpc", rpc)):
            capacity_rps = await capacity_of(sender(callers[Priority.NORMAL]), options)
            print(f"{door:5} capacity {capacity_rps:.0f}/s", flush=True)
            for priority in sorted(callers):
                for place, multiple in enumerate([*options.multiples, options.multiples[0]]):
                    await asyncio.sleep(PAUSE_S)
                    case = {
                        "door": door,
                        "priority": priority.name.lower(),
                        "multiple": multiple,
                        "is_after_overload": place == len(options.multiples),
                    }
                    rows.append(await overload_row(sender(callers[priority]), case, capacity_rps, options))
    return {**about_run("serve overload"), "rows": rows}


async def capacity_of(send: Send, options: argparse.Namespace) -> float:
    """Return the answers in time per second for closed-loop callers."""
    started_s, num_in_time = time.perf_counter(), 0

    async def call_again_and_again(first: int) -> None:
        nonlocal num_in_time
        while (departed_s := time.perf_counter()) < started_s + options.seconds:
            outcome = await send(first)
            num_in_time += outcome.is_ok and 1_000 * (time.perf_counter() - departed_s) <= options.deadline_ms
            first += NUM_CALLERS

    await asyncio.gather(*(call_again_and_again(number) for number in range(NUM_CALLERS)))
    return num_in_time / (time.perf_counter() - started_s)


async def overload_row(
    send: Send, case: dict[str, Any], capacity_rps: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of one multiple of the capacity, and print it."""
    rate_rps = case["multiple"] * capacity_rps
    load = await run_load(send, rate_rps, max(1, round(rate_rps * options.seconds)))
    answered_ms = [shot.latency_ms for shot in load.shots if shot.outcome.is_ok]
    refused_ms = [shot.latency_ms for shot in load.shots if not shot.outcome.is_ok]
    row: dict[str, Any] = {
        **case,
        "capacity_rps": round(capacity_rps, 1),
        "refused": round(len(refused_ms) / len(load.shots), 5),
        "answered_p99_ms": round(percentile(answered_ms, 0.99), 2) if answered_ms else None,
        "refused_p99_ms": round(percentile(refused_ms, 0.99), 2) if refused_ms else None,
        **summary(load, rate_rps, options.deadline_ms),
    }
    show(row, "door", "priority", "multiple", "rate_rps", "goodput_rps", "answered_p99_ms", "refused_p99_ms", "reasons")
    return row
