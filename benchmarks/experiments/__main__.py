"""Canary analysis, reports and off-policy estimates, against simulations with known truth.

    python -m benchmarks.experiments --json OUT [--only release|worse|reports|off-policy] [--num N] [--processes N]

`release`: an equal candidate, five guards, a look each minute of a day: how often it is found worse. `worse`: time
until worse candidates are found. `reports`: the same for A/A experiments with daily looks, intervals, and sample-ratio
mismatch. `off-policy`: how often intervals contain the truth, by kind of log, and which logs are refused. With `--only`
the file's other parts are kept. A quarter of an hour on one core.
"""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.experiments.policies import coverage
from benchmarks.experiments.release import detections, false_alarms
from benchmarks.experiments.reports import a_a, always_covered, mismatches
from benchmarks.load.command import about_run, at_least_one, report_parser, write_report

_LOGS = ("drawn by Plackett-Luce", "hashed variants", "an item is never shown first", "deterministic")


def main() -> None:
    """Run the parts, print each, write the JSON after each."""
    parser = report_parser(__doc__ or "")
    parser.add_argument("--only", choices=sorted(_PARTS), help="run only one part")
    parser.add_argument("--num", type=at_least_one, default=1_000, help="simulations of a rate (1000)")
    parser.add_argument("--processes", type=at_least_one, default=1, help="that simulate releases (1)")
    options = parser.parse_args()
    report: dict[str, Any] = json.loads(options.json.read_text()) if options.only and options.json.exists() else {}
    report = about_run("experiments") | {key: one for key, one in report.items() if key in _PARTS}
    for name in [options.only] if options.only else _PARTS:
        started = time.monotonic()
        found = _PARTS[name](options)
        report[name] = {**found, "seconds": round(time.monotonic() - started, 1)}
        print(json.dumps({name: report[name]}, indent=1))
        write_report(options.json, report)


_PARTS: Mapping[str, Callable[[Namespace], dict[str, Any]]] = {
    "off-policy": lambda options: {"logs": [coverage(kind, max(1, options.num // 2)) for kind in _LOGS]},
    "reports": lambda options: {
        "a_a": a_a(options.num),
        "intervals": always_covered(max(1, options.num // 2)),
        "mismatch": mismatches(options.num),
    },
    "release": lambda options: false_alarms(options.num, options.processes),
    "worse": lambda options: {"cases": detections(max(1, options.num // 20), options.processes)},
}


if __name__ == "__main__":
    main()
