"""Time and memory of each stage of the offline pipeline as the data grows.

    python -m benchmarks.pipeline --json OUT [--points EVENTSxITEMS ...] [--until STAGE] [--limit-s 300]

Events are synthetic (stages.py) with a fixed seed. A separate process measures each stage of each point, with one
thread and within `--limit-s`, on the output of the earlier stages; a real Valkey holds the features. `train` and
`distill` run one epoch of the shipped recipe for data of that size and validate once: a poor model ranks at the usual
cost. `precompute` makes 300 lists.

cpu_s are processor seconds of a stage's own processes, excluding Valkey; unlike `seconds` they hardly grow with other
load. rss_mb is the peak memory of the largest process of a stage, libraries included (`distill` has two processes, and
`tokenize` joins in a separate process). If a stage exceeds its limit, the later stages are skipped. Rows already in OUT
are kept.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.load.command import about_run, above_zero, at_least_one, report_parser, rows_on_file, write_report
from benchmarks.load.point import run_point
from benchmarks.load.table import table_of
from benchmarks.scale import servers
from services.settings.settings import inherited_environment

STAGES = ("ingest", "features", "tokenize", "train", "distill", "evaluate", "precompute")
FIELDS = ("events", "items", "stage", "seconds", "cpu_s", "rss_mb")
_POINTS = (
    (10_000, 1_000),
    (100_000, 10_000),
    (1_000_000, 10_000),
    (1_000_000, 100_000),
    (1_000_000, 1_000_000),
    (10_000_000, 1_000_000),
)
_CHILD = "from benchmarks.pipeline.stages import main; main()"
"""Not `-m`: child processes of a stage would import the main module, and with it all libraries."""


def main() -> None:
    """Measure the points, print a table, and write the file after each stage."""
    options = _options()
    rows = {_key(row): row for row in rows_on_file(options.json)}
    for num_events, num_items in options.points:
        for row in _measure(num_events, num_items, options):
            rows[_key(row)] = row
            write_report(options.json, about_run("pipeline") | {"rows": [rows[key] for key in sorted(rows)]})
    Console().print(table_of([rows[key] for key in sorted(rows)], FIELDS))


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--points", nargs="+", type=_point, default=_POINTS, metavar="EVENTSxITEMS")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage measured")
    parser.add_argument("--limit-s", type=above_zero, default=300.0, help="seconds for each stage")
    return parser.parse_args()


def _point(text: str) -> tuple[int, int]:
    events, _, items = text.partition("x")
    return at_least_one(events), at_least_one(items)


def _key(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["events"], row["items"], STAGES.index(row["stage"])


def _measure(num_events: int, num_items: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        settings = servers.settings_in(Path(folder))
        environment = inherited_environment() | settings.as_environment() | {"TMPDIR": folder, "OMP_NUM_THREADS": "1"}

        def run(*words: str) -> dict[str, Any] | None:
            name = f"{num_events} events, {num_items} items, {words[0]}"
            sys.stderr.write(f"{name}\n")
            return run_point(name, [sys.executable, "-c", _CHILD, *words], options.limit_s, environment)

        measured = run("tables", str(num_events), str(num_items))
        with servers.valkey(settings):
            for stage in STAGES[: STAGES.index(options.until) + 1]:
                measured = None if measured is None else run(stage)
                point = {"events": num_events, "items": num_items, "stage": stage}
                yield dict.fromkeys(FIELDS) | point | (measured or {})


if __name__ == "__main__":
    main()
