"""The stack's processor time without requests, by process group: `python -m benchmarks.serve idle --json OUT`.

Uses the running stack; `--up` starts a stack and stops it afterwards. The stack settles before the measurement.
"""

import asyncio
import time
from typing import Any

import psutil

from benchmarks.load.clients import RestClient
from benchmarks.load.command import about_run, above_zero, report_parser, write_report
from benchmarks.load.footprint import find_groups, used_by
from benchmarks.load.own_stack import SETTLE_S, parse_for_stack, require_ready, stack_for
from infra.local.supervisor.stackfile import StackFile
from services.settings.settings import Settings, load_settings


def main() -> None:
    """Measure, print a table, write the JSON."""
    settings = load_settings()
    parser = report_parser(__doc__)
    parser.add_argument("--seconds", type=above_zero, default=60.0, help="of the measurement")
    parser.add_argument("--settle-s", type=above_zero, default=SETTLE_S, help="before the measurement")
    options = parse_for_stack(parser, settings)
    with stack_for(settings, is_started=options.up):
        asyncio.run(_check(options.url))
        time.sleep(options.settle_s)
        report = measure(settings, options.seconds)
    for name, cores in report["cores"].items():
        print(f"{name:12} {cores:.3f}")
    print(f"{'in all':12} {report['cores_in_all']:.3f} of a core")
    write_report(options.json, report)


async def _check(url: tuple[str, int]) -> None:
    """Exit with the fix if no stack is ready at this address."""
    async with RestClient(*url) as rest:
        await require_ready(rest)


def measure(settings: Settings, seconds: float) -> dict[str, Any]:
    """Return the fraction of a core that each group of processes uses over `seconds`."""
    groups = find_groups(settings.state_dir)
    if record := StackFile(settings.state_dir).read():
        groups["supervisor"] = [psutil.Process(record.supervisor_pid)]
    with used_by(groups) as usage:
        time.sleep(seconds)
    cores = {name: round(cpu_s / usage.wall_s, 3) for name, cpu_s in sorted(usage.cpu_s.items())}
    return about_run("serve idle") | {"seconds": seconds, "cores": cores, "cores_in_all": round(sum(cores.values()), 3)}
