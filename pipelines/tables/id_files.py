"""Files of ids: an id per line, or a table with a column of ids. Normalised like ids of events and items."""

import csv
import re
from pathlib import Path

import polars as pl

from pipelines.tables.cells import as_text, present
from pipelines.tables.columns import is_known, letters
from pipelines.tables.encoding import as_utf8, head_of, utf8_chunks
from pipelines.tables.files import Table
from pipelines.tables.ids import IdColumn, whole_form
from services.errors import ConfigError, DataError

_SEPARATOR = re.compile(r"[\t;|,]")
_HEADS = {
    "user_id": ("userid", "userids", "user", "users", "uid", "id", "ids"),
    "item_id": ("itemid", "itemids", "item", "items", "sku", "id", "ids"),
}


def read_ids(path: Path, field: str, option: str) -> list[str]:
    """Return the ids of a file, in order, skipping blank lines.

    Args:
        path: A file with an id per line, or a table (as for `tailrace import`) with a column `field`.
        field: user_id or item_id.
        option: The option that names the file, for errors.

    Raises ConfigError.
    """
    try:
        words, column = _column(path, field), IdColumn()
        column.look_at(words)
        column.refuse(field, path.name, "'u17'")
    except DataError as error:
        raise ConfigError(f"{option}: {error}") from error
    ids = whole_form(words, column).drop_nulls().to_list()
    if not ids:
        raise ConfigError(f"{option}: {path} holds no ids; give one id per line, or a table with a column {field}")
    return ids


def _column(path: Path, field: str) -> pl.Series:
    """Return the ids as written. A word such as `nan` is missing in a table, but an id on its own line."""
    if not path.is_file():
        raise DataError("", f"no file {path}", "a text file with one id a line")
    head = head_of(path)
    if head.startswith((b"PAR1", b"ARROW1", b"{", b"[", b"PK\x03\x04", b"SQLite")):
        return _of_table(path, field)
    data = as_utf8(b"".join(utf8_chunks(path)))[0].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = [line for line in data.decode().split("\n") if line.strip()]
    names, second = ([letters(cell) for cell in _SEPARATOR.split(line)] for line in (*lines, "", "")[:2])
    is_header = len(lines) > 1 and any(is_known(name) and name not in second for name in names)
    if len(names) > 1 and (letters(field) in names or is_header):
        return _of_table(path, field)
    if names[0] in _HEADS[field] and len(names) == 1:
        lines = lines[1:]
    return pl.Series([_unquoted(line) for line in lines], dtype=pl.String)


def _of_table(path: Path, field: str) -> pl.Series:
    table = Table(path, None, is_known)
    alike = [name for name in table.columns if letters(name) == letters(field)] or list(table.columns)
    if len(alike) != 1:
        raise DataError(field, f"missing among {', '.join(table.columns)} in {table.name}", "a column of that name")
    parts = [as_text(batch.frame[alike[0]]) for batch in table.batches()]
    return present(pl.concat(parts))[0] if parts else pl.Series([], dtype=pl.String)


def _unquoted(line: str) -> str:
    """Return a line without the quotes around all of it."""
    text = line.strip()
    if not (len(text) > 1 and text.startswith('"') and text.endswith('"')):
        return text
    try:
        (fields,) = csv.reader([text], delimiter="\x1f", strict=True)
    except csv.Error:
        return text
    return fields[0]
