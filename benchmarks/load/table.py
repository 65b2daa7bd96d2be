"""Rows of results as a table on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def table_of(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Table:
    """Return these fields of the rows, one column each; what was not measured is empty."""
    table = Table(*fields, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in fields))
    return table
