"""Reads the files of a framework: a CSV or Parquet table, a JSON document, or JSON Lines. Raises Refused."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.foreign.refused import Refused
from pipelines.tables.delimited import Delimited, read_dialect
from pipelines.tables.encoding import as_utf8, utf8_chunks
from services.errors import DataError

TABLES = {".csv", ".tsv", ".parquet"}
_PART_OF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""A part of a surrogate pair, as JSON writes it."""


def table_rows(path: Path, fix: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table; cells of a CSV are text, in any encoding that the tables of items may have."""
    if path.suffix != ".parquet":
        return _delimited(path, fix)
    try:
        return pl.read_parquet(path).to_dicts()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise Refused(path.name, "", f"not readable as parquet ({error})", fix) from error


def _delimited(path: Path, fix: str) -> Sequence[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    try:
        for batch in Delimited(path, read_dialect(path, None, lambda _name: False)):
            for row, reason in batch.set_aside:
                raise Refused(path.name, f"row {row - 1}", reason, fix)
            rows += batch.frame.to_dicts()
    except DataError as error:
        raise Refused(path.name, "", error.problem, fix) from error
    return rows


def text_of(path: Path, fix: str) -> str:
    """Return a file's text, without a byte order mark."""
    try:
        return as_utf8(b"".join(utf8_chunks(path)))[0].decode()
    except DataError as error:
        raise Refused(path.name, "", error.problem, fix) from error


def json_lines(path: Path, text: str, fix: str) -> Iterator[Any]:
    """Yield the value of each line that is not empty. Other separators of lines than LF may occur within JSON texts."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield json_value(path, line, fix, f"line {number}")


def json_object(path: Path, fix: str) -> dict[str, Any]:
    """Return the JSON object of a file."""
    value = json_value(path, text_of(path, fix), fix)
    if not isinstance(value, dict):
        raise Refused(path.name, "", f"not a JSON object ({value!r:.40})", fix)
    return value


def json_value(path: Path, text: str, fix: str, row: str = "") -> Any:
    """Return the value of a JSON text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(path.name, row, f"not JSON ({error})", fix) from error
    check_pairs(path, text, value, fix, row)
    return value


def check_pairs(path: Path, text: str, value: Any, fix: str, row: str = "") -> None:
    """Reject a JSON text whose value holds half of a surrogate pair, which no encoding can represent."""
    try:
        if _PART_OF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(path.name, row, f"half of a surrogate pair ({error.object[error.start]!a})", fix) from error
