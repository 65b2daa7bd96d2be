"""Results files, and Markdown tables filled from them.

A format names fields of a row: `{p50_ms:.1f}`, `{text[lists]}`. `{deadline_met:%2}` is in per cent with two digits,
without the sign, as headers have it. A field that is null or absent is `-`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Row = Mapping[str, Any]
MIDDLE_AND_TAIL = "{p50_ms:.0f} / {p99_ms:.0f}"
OUTCOME = "{availability:%2} | {deadline_met:%2} | {p99_ms:,.0f}"
"""What callers saw, under `% answered | % in time | p99 ms`."""


@cache
def result(name: str) -> dict[str, Any]:
    """Read `benchmarks/results/<name>.json`. Callers must not change the returned value."""
    read: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return read


class _Cells(Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.{format_spec[1:]}f}" if format_spec.startswith("%") else format(value, format_spec)


def fill(text: str, row: Row) -> str:
    """Return a format filled from a row."""
    return _Cells().vformat(text, (), row)


def table(head: str, columns: str, rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table; `head` and `columns` have a bar between two columns."""
    yield f"| {head} |"
    yield "|" + "---|" * (1 + head.count(" | "))
    for row in rows:
        yield f"| {fill(columns, row)} |"


def figures(run: Row, *lines: str) -> Iterator[str]:
    """Yield the lines of a table of figures: each line has a figure's name, a bar, and its value."""
    return table("figure | value", "{line}", [{"line": fill(line, run)} for line in lines])


def largest(rows: Iterable[Row], name: str) -> Any:
    """Return the largest value of a field, None if no row has it."""
    return max((row[name] for row in rows if row[name] is not None), default=None)
