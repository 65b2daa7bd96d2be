"""Files of ids: an id per line, or a table with a column of ids. Normalised like ids of events and items."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from pipelines.tables.cells import as_text, present
from pipelines.tables.columns import SUGGESTED, is_known, letters, listed
from pipelines.tables.encoding import as_utf8, head_of, utf8_chunks
from pipelines.tables.files import Table
from pipelines.tables.ids import IdColumn, whole_form
from services.errors import ConfigError, DataError

_SEPARATOR = re.compile(r"[\t;|,]")
_JSON = re.compile(rb'\s*(\{\s*"|\[\s*[\[{"])')
_COLUMN_SEPARATORS = "\t;,"
"""Separators of a table without a known column. Ids such as `auth0|17` have the other."""
_HEADS = {
    "user_id": ("userid", "userids", "user", "users", "uid", "id", "ids"),
    "item_id": ("itemid", "itemids", "item", "items", "sku", "id", "ids"),
}


def read_ids(path: Path, field: str, option: str) -> list[str]:
    """Return the ids of a file, in order, skipping blank lines.

    Args:
        path: A file with an id per line, or a table (as for `tailrace import`) with a column `field`. A line in double
            quotes is an id, whatever it contains.
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
    if head.startswith((b"PAR1", b"ARROW1", b"PK\x03\x04", b"SQLite")) or _JSON.match(head):
        return _of_table(path, field)
    data = as_utf8(b"".join(utf8_chunks(path)))[0].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    lines = [line for line in data.decode().split("\n") if line.strip()]
    if lines and re.fullmatch(r"sep=.", lines[0].strip()):
        lines = lines[1:]
    names, second = ([letters(cell) for cell in _SEPARATOR.split(line)] for line in (*lines, "", "")[:2])
    is_header = len(lines) > 1 and any(is_known(name) and name not in second for name in names)
    if len(names) > 1 and (letters(field) in names or is_header):
        return _of_table(path, field)
    _refuse_columns(lines, field, path.name)
    ids = [_unquoted(line) for line in lines]
    if len(names) == 1 and (names[0] in _HEADS[field] or (names[0] in SUGGESTED[field] and names[0].endswith("id"))):
        ids = ids[1:]
    elif len(lines) > 1 and ids[0] == lines[0].strip() and _is_head(names, ids, field):
        problem = f"the first line of {path.name}, {ids[0][:40]}, looks like a column's name"
        raise DataError("", f"{problem}; write {field} instead, or quote an id", f'"{ids[0][:40]}"')
    return pl.Series(ids, dtype=pl.String)


def _refuse_columns(lines: Sequence[str], field: str, name: str) -> None:
    """Raise DataError if every line has several fields, with the fields of the first."""
    for separator in _COLUMN_SEPARATORS:
        if lines and all(separator in line and _unquoted(line) == line.strip() for line in lines):
            shown = ", ".join(lines[0].split(separator))[:80]
            problem = f"missing among {shown} in {name}; give the column of ids that name, or quote each id"
            raise DataError(field, problem, f'"a{separator}1"')


def _is_head(names: Sequence[str], ids: Sequence[str], field: str) -> bool:
    """Whether the first of several ids is more likely a column's name, since only it has no digits."""
    is_word = not re.search(r"\d", ids[0])
    return len(names) == 1 and (names[0] in SUGGESTED[field] or (is_word and all(map(str.isdecimal, ids[1:]))))


def _of_table(path: Path, field: str) -> pl.Series:
    table = Table(path, None, is_known)
    alike = [name for name in table.columns if letters(name) == letters(field)] or list(table.columns)
    if len(alike) != 1:
        raise DataError(field, f"missing among {listed(table.columns)} in {table.name}", "a column of that name")
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
