"""Time from an event to the first answer that includes it, one event at a time, under background load.

    python -m benchmarks.freshness --json OUT [--events 500] [--rate 20] [--quiet 3] [--up]

Each event belongs to a new user: POST the event, then request recommendations until the answer's `newest_event_time_ms`
is the event's. Time counts from the acknowledgement. The background load is open-loop: recommendations for known users
at `--rate`, and a click for every second one. Uses the running stack; `--up` starts one and stops it afterwards.
Before, `--quiet` single events come after a minute without any request each.
`python -m benchmarks.freshness erasures` and `hides` measure erased users and hidden items.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from typing import Any

from benchmarks.freshness.answers import answered, asks_and_clicks, background_load
from benchmarks.load.clients import RestClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, run_named, write_report
from benchmarks.load.open_loop import percentiles
from benchmarks.load.own_stack import parse_for_stack, ready_stack, stack_for
from services.settings.settings import load_settings

QUIET_S = 60.0


def main() -> None:
    """Measure, print a line, write the JSON."""
    settings = load_settings()
    parser = report_parser(__doc__)
    parser.add_argument("--events", type=at_least_one, default=500, help="number of events, one after another")
    parser.add_argument("--rate", type=above_zero, default=20.0, help="background recommendations a second")
    parser.add_argument("--quiet", type=int, default=0, help="events after a minute without requests each")
    options = parse_for_stack(parser, settings)
    with stack_for(settings, is_started=options.up):
        report = asyncio.run(_measure(options))
    write_report(options.json, report)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    async with ready_stack(options.url) as (rest, audience):
        quiet_ms = []
        for _ in range(options.quiet):
            await asyncio.sleep(QUIET_S)
            quiet_ms.append(round(1_000 * await _sight(rest, audience.item_ids[0]), 3))
        async with background_load(asks_and_clicks(rest, audience), options.rate):
            visible_ms = [1_000 * await _sight(rest, audience.item_ids[0]) for _ in range(options.events)]
    latency = percentiles(visible_ms, 50, 95, 99, 100)
    print(f"{options.events} events, visible after p50 {latency['p50_ms']} ms, p99 {latency['p99_ms']} ms")
    about = {"num_events": options.events, "background_rps": options.rate, "after_quiet_ms": quiet_ms}
    return about_run("freshness") | about | latency


async def _sight(rest: RestClient, item_id: str) -> float:
    """Send one event of a new user; return the seconds until an answer includes it. Exits if that never happens."""
    user_id, event_time_ms = f"fresh-{uuid.uuid4().hex}", time.time_ns() // 1_000_000
    event = {"user_id": user_id, "item_id": item_id, "event_time_ms": event_time_ms, "event_id": user_id}
    status, body = await rest.call(b"POST", b"/v1/events", json.dumps(event).encode())
    acknowledged_s = time.perf_counter()
    if status not in {200, 202}:
        sys.exit(f"error: the event was refused with {status}: {body.decode(errors='replace')}")
    return await answered(rest, user_id, lambda newest_ms: newest_ms == event_time_ms) - acknowledged_s


if __name__ == "__main__":
    run_named({name: f"benchmarks.freshness.{name}" for name in ("erasures", "hides")}, main)
