"""Results files, and Markdown tables made from them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def result(name: str) -> dict[str, Any]:
    """Read `benchmarks/results/<name>.json`. Callers must not change the returned value."""
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return read


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def interval(row: dict[str, Any], digits: int = 4) -> str:
    """Return a signed difference with its 95 % interval; the row has `difference`, `low` and `high`."""
    difference, low, high = (f"{row[name]:+.{digits}f}" for name in ("difference", "low", "high"))
    return f"{difference} ({low} to {high})"


def percent(fraction: float, digits: int = 2) -> str:
    """Return a fraction in per cent, without the sign: table headers have it."""
    return f"{100 * fraction:.{digits}f}"


def middle_and_tail(row: dict[str, Any], digits: int = 0) -> str:
    """Return a row's p50 and p99 in milliseconds."""
    return f"{row['p50_ms']:.{digits}f} / {row['p99_ms']:.{digits}f}"


def outcome(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return what callers saw: % answered, % in time, p99 in milliseconds."""
    return percent(row["availability"]), percent(row["deadline_met"]), f"{row['p99_ms']:,.0f}"


def optional(value: float | None, spec: str) -> str:
    """Format a number; `-` if it was not measured."""
    return "-" if value is None else format(value, spec)
