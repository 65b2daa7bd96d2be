"""How cost grows with size.

    python -m benchmarks.scale --json OUT [--axis NAME ...] [--sizes N ...]

Axes: `items` (items of the catalogue; p99_ms: a request's way through the student, loop_ms: the processor time of the gateway's loop for it)
and `popularity` (distinct items of one log partition; p99_ms and loop_ms: time and processor time of the worker's applying thread per
publication). Each size is measured in a process of its own, whose memory is rss_mb. A field that an axis does not measure is null. `--sizes`
replaces 1,000 to 1,000,000.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.load.command import about_run, at_least_one, write_report
from benchmarks.scale.row import FIELDS

AXES = ("items", "popularity")
_SIZES = (1_000, 10_000, 100_000, 1_000_000)


def main() -> None:
    """Measure the axes, print a table, and write the file."""
    options = _options()
    cases = [(axis, size) for axis in options.axis for size in options.sizes]
    rows = [_measure(axis, size) for axis, size in track(cases, "measuring", console=Console(stderr=True))]
    table = Table(*FIELDS)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in FIELDS))
    Console().print(table)
    write_report(options.json, about_run("scale") | {"rows": rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--axis", nargs="+", choices=AXES, default=AXES, metavar="NAME", help=f"of {', '.join(AXES)}")
    parser.add_argument("--sizes", nargs="+", type=at_least_one, default=_SIZES, metavar="N")
    return parser.parse_args()


def _measure(axis: str, size: int) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.scale.{axis}", str(size)]
    row: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return row


if __name__ == "__main__":
    main()
