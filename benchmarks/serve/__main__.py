"""Open-loop load over REST and gRPC, tier by tier, with a no-op call measured in the same run.

    python -m benchmarks.serve --json OUT [--rate 50] [--seconds 10] [--deadline-ms 50 200] [--url ...] [--grpc ...]

Uses the running stack (by default the one of this environment's settings); `--up` starts one and stops it afterwards.
Latency counts from the intended departure. `cpu_ms` is the stack's processor time per request above idle. Bounded in
requests and time.
"""

import argparse
import asyncio
import sys
from typing import Any

from benchmarks.load.audience import TIERS, Audience, sender
from benchmarks.load.clients import DoorClient, GrpcClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, run_named, write_report
from benchmarks.load.footprint import CpuMeter, Groups, find_groups, used_by
from benchmarks.load.open_loop import Send, run_load, summary
from benchmarks.load.own_stack import SETTLE_S, parse_for_stack, ready_stack, stack_for
from benchmarks.load.table import show
from services.settings.settings import Settings, load_settings

NOOP = "noop"
WARM_UP_REQUESTS = 20
IDLE_S = 5.0
_SHOWN = ("door", "tier", "deadline_ms", "p50_ms", "p99_ms", "deadline_met", "cpu_ms", "generator_cpu_share", "tiers")


def main() -> None:
    """Measure, print a table, write the JSON."""
    settings = load_settings()
    options = _options(settings)
    with stack_for(settings, is_started=options.up, settle_s=SETTLE_S):
        report = asyncio.run(_measure(options, find_groups(settings.state_dir)))
    write_report(options.json, report)


def _options(settings: Settings) -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--rate", type=above_zero, default=50.0, help="requests a second")
    parser.add_argument("--seconds", type=above_zero, default=10.0, help="per case")
    parser.add_argument("--deadline-ms", type=at_least_one, nargs="+", default=[50, 200], help="one case for each")
    return parse_for_stack(parser, settings)


async def _measure(options: argparse.Namespace, groups: Groups) -> dict[str, Any]:
    async with ready_stack(options.url) as (rest, audience), GrpcClient(options.grpc) as rpc:
        with used_by(groups) as idle:
            await asyncio.sleep(IDLE_S)
        cases = []
        for door, caller in (("rest", rest), ("grpc", rpc)):
            cases += await _measure_door(door, caller, audience, options, CpuMeter(groups, idle))
    return about_run("serve") | {"cases": cases}


async def _measure_door(
    door: str, caller: DoorClient, audience: Audience, options: argparse.Namespace, meter: CpuMeter
) -> list[dict[str, Any]]:
    """Measure the no-op call, then each tier at each deadline, and relate the medians."""
    noop = await _case(lambda _: caller.nothing(), door, NOOP, options.deadline_ms[0], options, meter)
    cases = [noop]
    for tier in (*TIERS, "mixed"):
        asks = audience.asks(tier)
        if asks is None:
            print(f"{door:5} {tier:12} no user for this tier", file=sys.stderr)
            continue
        for deadline_ms in options.deadline_ms:
            case = await _case(sender(caller, asks, deadline_ms), door, tier, deadline_ms, options, meter)
            cases.append(case | {"p50_over_noop": round(case["p50_ms"] / noop["p50_ms"], 2)})
    return cases


async def _case(
    send: Send, door: str, tier: str, deadline_ms: int, options: argparse.Namespace, meter: CpuMeter
) -> dict[str, Any]:
    for number in range(WARM_UP_REQUESTS):
        await send(number)
    with used_by(meter.groups) as usage:
        load = await run_load(send, options.rate, max(1, round(options.rate * options.seconds)))
    case: dict[str, Any] = {"door": door, "tier": tier, **summary(load, options.rate, deadline_ms)}
    case |= meter.per_request(usage, len(load.shots))
    show(case, *_SHOWN)
    return case


if __name__ == "__main__":
    run_named({name: f"benchmarks.serve.{name}" for name in ("idle", "overload", "machines", "lists")}, main)
