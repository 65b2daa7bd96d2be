"""The stack on slower machines: its deadline and its goodput at full speed, on one core, and next to busy processes.

    python -m benchmarks.serve machines --json OUT [--rate 50] [--seconds 5] [--rounds 1] [--multiples 0.5 1 2 5 10]
                                              [--up]

`full`: the machine as it is. `one core`: all of the stack's threads on one core, the load generator on the rest.
`hogs`: a busy process for each core, at the priority of the stack. In each setting and at each door: the requests at
`--rate` within 50 ms, with the processor time of each above idle, then `benchmarks.serve overload` without keys. A row
whose `generator_cpu_share` exceeds half of a core says little of the stack.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.load.audience import Audience, sender
from benchmarks.load.capacity import closed_loop_rps
from benchmarks.load.clients import LeanGrpcClient, LoadClient
from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, write_report
from benchmarks.load.footprint import CpuMeter, Groups, find_groups, used_by
from benchmarks.load.open_loop import run_load, summary
from benchmarks.load.own_stack import SETTLE_S, parse_for_stack, ready_stack, stack_for
from benchmarks.load.table import show
from benchmarks.serve.overload import MULTIPLES, overload_rows
from services.settings.settings import Settings, load_settings

SHORT_DEADLINE_MS = 50
IDLE_S = 3.0
_BUSY = "while True: pass"


def main() -> None:
    """Measure each setting, and write the JSON."""
    settings = load_settings()
    options = _options(settings)
    with stack_for(settings, is_started=options.up, settle_s=SETTLE_S):
        groups = find_groups(settings.state_dir)
        rows = []
        for name, slowed in (("full", nullcontext), ("one core", lambda: on_one_core(groups)), ("hogs", beside_hogs)):
            with slowed():
                rows += [{"setting": name, **row} for row in uvloop.run(_measure(options, groups))]
    write_report(options.json, about_run("serve machines") | {"rows": rows})


def _options(settings: Settings) -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--rate", type=above_zero, default=50.0, help="requests a second for the short deadline")
    parser.add_argument("--multiples", type=above_zero, nargs="+", default=MULTIPLES, help="of the capacity")
    parser.add_argument("--seconds", type=above_zero, default=5.0, help="per row; ten times as long for the deadline")
    parser.add_argument("--rounds", type=at_least_one, default=1, help="of the overload; its rows are medians")
    parser.add_argument("--deadline-ms", type=at_least_one, default=200, help="of the overload")
    return parse_for_stack(parser, settings)


async def _measure(options: argparse.Namespace, groups: Groups) -> list[dict[str, Any]]:
    async with ready_stack(options.url) as (rest, audience), LeanGrpcClient(options.grpc) as rpc:
        with used_by(groups) as idle:
            await asyncio.sleep(IDLE_S)
        doors: tuple[tuple[str, LoadClient], ...] = (("rest", rest), ("grpc", rpc))
        return [
            row
            for door, caller in doors
            for row in await _measure_door(door, caller, audience, options, CpuMeter(groups, idle))
        ]


async def _measure_door(
    door: str, caller: LoadClient, audience: Audience, options: argparse.Namespace, meter: CpuMeter
) -> list[dict[str, Any]]:
    num_requests = round(10 * options.rate * options.seconds)
    send_short = sender(caller, audience.mixed, SHORT_DEADLINE_MS)
    with used_by(meter.groups) as usage:
        load = await run_load(send_short, options.rate, num_requests)
    short: dict[str, Any] = {"door": door, "kind": "deadline", **summary(load, options.rate, SHORT_DEADLINE_MS)}
    short |= meter.per_request(usage, num_requests)
    show(short, "door", "p50_ms", "p99_ms", "deadline_met", "cpu_ms", "generator_cpu_share")
    send = sender(caller, audience.mixed, options.deadline_ms)
    capacity_rps = await closed_loop_rps([send], options.seconds, options.deadline_ms)
    case = {"door": door, "kind": "overload", "priority": "normal"}
    return [short, *await overload_rows(send, case, capacity_rps, options, meter.groups)]


@contextmanager
def on_one_core(groups: Groups) -> Iterator[None]:
    """Keep all threads of the stack on the last core during the block."""
    cores = os.sched_getaffinity(0)
    _set_cores(groups, {max(cores)})
    try:
        yield
    finally:
        _set_cores(groups, cores)


def _set_cores(groups: Groups, cores: set[int]) -> None:
    for process in (process for group in groups.values() for process in group):
        for thread in Path(f"/proc/{process.pid}/task").glob("*"):
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def beside_hogs() -> Iterator[None]:
    """Run a busy process for each core during the block."""
    hogs = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


if __name__ == "__main__":
    main()
