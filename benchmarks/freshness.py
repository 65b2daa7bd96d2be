"""Time from an event to the first answer that includes it, one event at a time, under background load.

    python -m benchmarks.freshness --json OUT [--events 500] [--rate 20] [--url HOST:PORT] [--up]

Each event belongs to a new user: POST the event, then request recommendations until the answer's `newest_event_time_ms` is
the event's. Time counts from the acknowledgement, and separately from before the POST. The background load is open-loop:
recommendations for known users at `--rate`, and a click for every second one. Uses the running stack; `--up` starts one and
stops it afterwards.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.audience import Audience, find_audience
from benchmarks.load.clients import RestClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.open_loop import RequestOutcome, percentile, run_load
from benchmarks.load.own_stack import add_stack_options, require_ready, stack_for
from services.settings.settings import Settings, load_settings

PAUSE_S = 0.002
GIVE_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """One event: seconds from before its POST, and from its acknowledgement, to the first answer that includes it."""

    since_sent_s: float
    since_acknowledged_s: float


def main() -> None:
    """Measure, print a line, write the JSON."""
    settings = load_settings()
    options = _options(settings)
    with stack_for(settings, is_started=options.up):
        report = asyncio.run(_measure(options))
    write_report(options.json, report)


def _options(settings: Settings) -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--events", type=at_least_one, default=500, help="number of events, one after another")
    parser.add_argument("--rate", type=above_zero, default=20.0, help="background recommendations a second")
    add_stack_options(parser, settings)
    return parser.parse_args()


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    async with RestClient(*options.url) as rest:
        await require_ready(rest)
        audience = await find_audience(rest)
        background = asyncio.create_task(_background(rest, audience, options.rate))
        try:
            sightings = [await _sight(rest, audience.item_ids[0]) for _ in range(options.events)]
        finally:
            background.cancel()
    report = _report(sightings, options.rate)
    print(f"{len(sightings)} events, visible after p50 {report['p50_ms']} ms, p99 {report['p99_ms']} ms")
    return report


async def _sight(rest: RestClient, item_id: str) -> Sighting:
    """Send one event of a new user and poll until an answer includes it. Exits if it is refused or never visible."""
    user_id, event_time_ms = f"fresh-{uuid.uuid4().hex}", time.time_ns() // 1_000_000
    event = {"user_id": user_id, "item_id": item_id, "event_time_ms": event_time_ms, "event_id": user_id}
    ask = json.dumps({"user_id": user_id, "k": 1}).encode()
    sent_s = time.perf_counter()
    status, body = await rest.call(b"POST", b"/v1/events", json.dumps(event).encode())
    acknowledged_s = time.perf_counter()
    if status not in {200, 202}:
        sys.exit(f"error: the event was refused with {status}: {body.decode(errors='replace')}")
    while time.perf_counter() - acknowledged_s < GIVE_UP_S:
        status, body = await rest.call(b"POST", b"/v1/recommendations", ask)
        seen_s = time.perf_counter()
        if status == 200 and json.loads(body)["newest_event_time_ms"] == event_time_ms:
            return Sighting(seen_s - sent_s, seen_s - acknowledged_s)
        await asyncio.sleep(PAUSE_S)
    sys.exit(f"error: the event of {user_id} was not visible within {GIVE_UP_S:g} s")


async def _background(rest: RestClient, audience: Audience, rate_rps: float) -> None:
    """Request for known users at a fixed rate, with a click for every second one, until cancelled."""
    users = audience.known_user_ids or ("nobody",)

    async def send(number: int) -> RequestOutcome:
        user_id = users[number % len(users)]
        if number % 2:
            now_ms = time.time_ns() // 1_000_000
            click = {"user_id": user_id, "item_id": audience.item_ids[0], "event_time_ms": now_ms}
            await rest.call(b"POST", b"/v1/events", json.dumps(click).encode())
        return await rest.recommend({"user_id": user_id, "k": 10})

    while True:
        await run_load(send, rate_rps, num_requests=1_000)


def _report(sightings: Sequence[Sighting], rate_rps: float) -> dict[str, Any]:
    visible_ms = [1_000 * sighting.since_acknowledged_s for sighting in sightings]
    sent_ms = [1_000 * sighting.since_sent_s for sighting in sightings]
    return {
        **about_run("freshness"),
        "num_events": len(sightings),
        "background_rps": rate_rps,
        "p50_ms": round(percentile(visible_ms, 0.5), 3),
        "p95_ms": round(percentile(visible_ms, 0.95), 3),
        "p99_ms": round(percentile(visible_ms, 0.99), 3),
        "max_ms": round(max(visible_ms), 3),
        "since_sent_p50_ms": round(percentile(sent_ms, 0.5), 3),
        "since_sent_p99_ms": round(percentile(sent_ms, 0.99), 3),
    }


if __name__ == "__main__":
    main()
