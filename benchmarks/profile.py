"""Whether the profiler names planted bottlenecks: traces of known kind, recorded by plain torch in separate processes.

    python -m benchmarks.profile --json OUT [--styles plain steps]

A plant is named if the verdict is its kind. A healthy plant is accused if the verdict names any bottleneck. Each
variant of `tests/support/profiler/plants.py` is recorded in each style; of two ranks, the first rank's trace counts.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.load.command import about_run, report_parser, write_report
from benchmarks.load.table import show
from pipelines.profiler.report import profile_of
from pipelines.profiler.trace import read_traces

_PLANTS = (sys.executable, "-m", "tests.support.profiler.plants")
_ROOT = Path(__file__).resolve().parents[1]
_STYLES = ("plain", "shapes", "stack", "steps")
_LIMIT_S = 600
_NONE = "none"


def main() -> None:
    """Record, evaluate, print a line each, write the counts."""
    options, rows = _options(), []
    for kind, variant in _variants():
        for row in _judged(kind, variant, options.styles):
            rows.append(row)
            show(row, "kind", "variant", "style", "bottleneck", "shares")
        write_report(options.json, {**about_run("profile"), **counts(rows), "rows": rows})
    found = counts(rows)
    print(f"{found['named']} of {found['plants']} named, {found['accused']} of {found['healthy']} healthy ones accused")


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of plants and of named plants, and the number of healthy and of accused plants."""
    planted = [row for row in rows if row["kind"] != _NONE]
    healthy = [row for row in rows if row["kind"] == _NONE]
    return {
        "plants": len(planted),
        "named": sum(row["bottleneck"] == row["kind"] for row in planted),
        "healthy": len(healthy),
        "accused": sum(row["bottleneck"] != _NONE for row in healthy),
    }


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--styles", nargs="+", choices=_STYLES, default=list(_STYLES))
    return parser.parse_args()


def _variants() -> list[tuple[str, str]]:
    done = subprocess.run([*_PLANTS, "--list"], cwd=_ROOT, capture_output=True, text=True, check=True)
    return [(kind, variant) for kind, variant in (line.split("\t") for line in done.stdout.splitlines())]


def _judged(kind: str, variant: str, styles: Sequence[str]) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        command = [*_PLANTS, kind, variant, folder, "--styles", *styles]
        subprocess.run(command, cwd=_ROOT, check=True, timeout=_LIMIT_S, capture_output=True)
        for style in styles:
            found = profile_of(read_traces([Path(folder) / f"{style}.json"])[0])
            yield {
                "kind": kind,
                "variant": variant,
                "style": style,
                "bottleneck": found.verdict.bottleneck.value,
                "span_us": round(found.parts.span_us),
                "shares": {name: round(share, 4) for name, share in found.shares.items()},
            }


if __name__ == "__main__":
    main()
