"""Send one load profile to the running stack, with a live view: `python -m benchmarks.serve load --profile spike`.

Open loop, counted from the intended departure. The requests of a spike use the low-priority key, if given, and are
reported separately. Bounded in requests and time.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from benchmarks.load.audience import RequestMix, find_audience
from benchmarks.load.clients import DoorClient, GrpcClient, RestClient
from benchmarks.load.command import about_run, above_zero, at_least_one, write_report
from benchmarks.load.live_view import LiveView
from benchmarks.load.open_loop import Load, RequestOutcome, run_schedule
from benchmarks.load.own_stack import require_ready
from benchmarks.load.profiles import Departure, Profile, departures
from benchmarks.load.scoring import summarise, tier_weights
from models.registry import BundleStore
from services.errors import ConfigError
from services.settings.addresses import read_secret
from services.settings.settings import Settings, load_settings


def main() -> None:
    """Send the load, show it live, print the table, write the JSON."""
    settings = load_settings()
    options = _options()
    console = Console(stderr=True)
    report = asyncio.run(_measure(settings, options, console))
    console.print(_table(report["parts"]))
    if options.json is not None:
        write_report(options.json, report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--profile", type=Profile, choices=list(Profile), default=Profile.STEADY, help="the load profile"
    )
    parser.add_argument("--rate", type=above_zero, default=50.0, help="requests a second on average")
    parser.add_argument("--duration", type=above_zero, default=30.0, help="seconds")
    parser.add_argument("--door", choices=["rest", "grpc", "both"], default="both", help="through which door")
    parser.add_argument("--deadline-ms", type=at_least_one, default=200, help="deadline of every request")
    parser.add_argument("--key-file", type=Path, help="a file with the API key to use")
    parser.add_argument("--low-key-file", type=Path, help="a file with the API key of the spike's callers")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args()


async def _measure(settings: Settings, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    planned = departures(options.profile, options.rate, options.duration)
    key, low_key = _key(options.key_file), _key(options.low_key_file or options.key_file)
    async with AsyncExitStack() as closing:
        rest = await closing.enter_async_context(RestClient(settings.http_host, settings.http_port, key))
        await require_ready(rest)
        audience = await find_audience(rest)
        crowd = RequestMix(audience, len(planned), is_long_tail=options.profile is Profile.LONG_TAIL)
        doors = {
            is_spike: await _doors(closing, settings, options.door, one)
            for is_spike, one in ((False, key), (True, low_key))
        }

        async def send(number: int) -> RequestOutcome:
            callers = doors[planned[number].is_spike]
            ask = {**crowd.ask(number), "deadline_ms": options.deadline_ms}
            return await callers[number // 4 % len(callers)].recommend(ask)

        view = LiveView(f"{options.profile} at {options.rate:g}/s for {options.duration:g} s", options.deadline_ms)
        with Live(view, console=console, refresh_per_second=4, transient=True):
            load = await run_schedule(send, [one.at_s for one in planned], view.ended)
    return _report(settings, options, planned, load)


async def _doors(closing: AsyncExitStack, settings: Settings, door: str, key: str) -> list[DoorClient]:
    callers: list[DoorClient] = []
    if door != "grpc":
        callers.append(await closing.enter_async_context(RestClient(settings.http_host, settings.http_port, key)))
    if door != "rest":
        callers.append(await closing.enter_async_context(GrpcClient(settings.grpc_address, key)))
    return callers


def _key(path: Path | None) -> str:
    try:
        return read_secret(path) if path is not None else ""
    except ConfigError as error:
        sys.exit(f"error: {error}")


def _report(
    settings: Settings, options: argparse.Namespace, planned: Sequence[Departure], load: Load
) -> dict[str, Any]:
    weights = tier_weights(BundleStore(settings.bundle_root).live().report())
    groups = {
        "base": [shot for shot in load.shots if not planned[shot.number].is_spike],
        "spike": [shot for shot in load.shots if planned[shot.number].is_spike],
    }
    return {
        **about_run("serve load"),
        "profile": options.profile,
        "rate_rps": options.rate,
        "duration_s": options.duration,
        "deadline_ms": options.deadline_ms,
        "generator_cpu_share": round(load.cpu_share, 3),
        "parts": {name: summarise(group, options.deadline_ms, weights) for name, group in groups.items() if group},
    }


def _table(parts: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None)
    for column in ("", "requests", "available", "in time", "p50 ms", "p99 ms", "goodput", "tiers"):
        table.add_column(column, justify="left" if column in {"", "tiers"} else "right")
    for name, part in parts.items():
        table.add_row(
            name,
            str(part["num_requests"]),
            f"{100 * part['availability']:.2f} %",
            f"{100 * part['deadline_met']:.2f} %",
            f"{part['p50_ms']:.1f}",
            f"{part['p99_ms']:.1f}",
            f"{part['goodput']:.3f}",
            " ".join(f"{tier}\N{NO-BREAK SPACE}{share:.0%}" for tier, share in part["tiers"].items()),
        )
    return table
