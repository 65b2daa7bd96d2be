"""Rows of results on the terminal: each as a line when it is measured, or all as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def show(row: Mapping[str, Any], *names: str) -> None:
    """Print these fields of a row as one line."""
    print("  ".join(f"{name} {row[name]}" for name in names), flush=True)


def table_of(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Table:
    """Return these fields of the rows, one column each; missing values are empty."""
    table = Table(*fields, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in fields))
    return table
