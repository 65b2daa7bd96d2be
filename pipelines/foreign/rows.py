"""Reads the files of a framework: a CSV or Parquet table, a JSON document, or JSON Lines. Raises Refused."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.foreign.refused import Refused

TABLES = {".csv", ".parquet"}


def table_rows(path: Path, fix: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table; cells of a CSV are text."""
    try:
        table = pl.read_parquet(path) if path.suffix == ".parquet" else pl.read_csv(path, infer_schema=False)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise Refused(path.name, "", f"not readable as {path.suffix[1:]} ({error})", fix) from error
    return table.to_dicts()


def text_of(path: Path, fix: str) -> str:
    """Return a file's text."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(path.name, "", f"not readable as text ({error})", fix) from error


def json_lines(path: Path, text: str, fix: str) -> Iterator[Any]:
    """Yield the value of each line that is not empty."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise Refused(path.name, f"line {number}", f"not JSON ({error})", fix) from error
