"""How cost grows with size.

    python -m benchmarks.scale --json OUT [--axis NAME ...] [--sizes N ...] [--limit-s 300] [--seconds 20]

| axis | p99_ms | loop_ms | other fields |
|---|---|---|---|
| items | a request's path through the student | processor time of the gateway's loop | student time, memory, recall |
| users | a gateway's read from a store of this size | its processor time | the store's memory and start |
| catalogue (items of 8 partitions, one worker) | | the workers' processor time per event, 2,000/s | freshness, restart
| | workers | | as catalogue | freshness, restart |
| history (events of the log at a restart) | | as catalogue | freshness while popularity is recounted, restart |

A separate process measures each point, with its own real servers, within `--limit-s`; rss_mb is the memory of the axis'
subject. A field that an axis does not measure is null, as are all fields of a point that was not measured in time.
Points already in OUT are kept, so that one axis may be measured again, or another added. `--sizes` replaces each axis'
sizes, `--seconds` sets the duration of the event load. `python -m benchmarks.scale item-states` measures item states.
"""

import argparse
import sys
import tempfile
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.load.command import (
    about_run,
    above_zero,
    at_least_one,
    report_parser,
    rows_on_file,
    run_named,
    write_report,
)
from benchmarks.load.point import run_point
from benchmarks.load.table import table_of
from benchmarks.scale.row import FIELDS
from services.settings.settings import inherited_environment

_SIZES = (1_000, 10_000, 100_000, 1_000_000)
AXES = {
    "items": (("items",), _SIZES),
    "users": (("users",), _SIZES),
    "catalogue": (("stream", "catalogue"), _SIZES),
    "workers": (("stream", "workers"), (1, 2, 3, 4)),
    "history": (("stream", "history"), (100_000, 1_000_000, 10_000_000)),
}
"""By axis: the module that measures a point with the arguments before its size, and the sizes."""


def main() -> None:
    """Measure the axes, print a table, and write the file after each point."""
    options = _options()
    cases = [(axis, size) for axis in options.axis for size in options.sizes or AXES[axis][1]]
    rows = {(row["axis"], row["size"]): row for row in rows_on_file(options.json)}
    for axis, size in track(cases, "measuring", console=Console(stderr=True)):
        rows[axis, size] = _measure(axis, size, options)
        write_report(options.json, about_run("scale") | {"rows": [rows[point] for point in sorted(rows, key=_place)]})
    Console().print(table_of([rows[case] for case in cases], FIELDS))


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--axis", nargs="+", choices=AXES, default=AXES, metavar="NAME", help=f"of {', '.join(AXES)}")
    parser.add_argument("--sizes", nargs="+", type=at_least_one, metavar="N")
    parser.add_argument("--limit-s", type=above_zero, default=300.0, help="seconds for each point")
    parser.add_argument("--seconds", type=above_zero, default=20.0, help="of events")
    return parser.parse_args()


def _place(point: tuple[str, int]) -> tuple[int, int]:
    return list(AXES).index(point[0]), point[1]


def _measure(axis: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one point in a separate process."""
    (module, *words), _ = AXES[axis]
    ending = [str(options.seconds)] if module == "stream" else []
    with tempfile.TemporaryDirectory() as folder:
        row = run_point(
            f"{axis} {size}",
            [sys.executable, "-m", f"benchmarks.scale.{module}", *words, str(size), *ending],
            options.limit_s,
            {**inherited_environment(), "TMPDIR": folder},
        )
    return dict.fromkeys(FIELDS) | {"axis": axis, "size": size} | (row or {})


if __name__ == "__main__":
    run_named({"item-states": "benchmarks.scale.item_states"}, main)
