"""One file as a table. Its first bytes decide the format, not its name. The meaning of columns is decided elsewhere."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import polars as pl

from models.files import stamp_of
from pipelines.tables.columnar import Columnar
from pipelines.tables.delimited import Delimited, RowBatch, read_dialect
from pipelines.tables.encoding import head_of
from pipelines.tables.json_rows import JsonRows
from services.errors import DataError

KINDS = "items.csv, .tsv, .txt, .json, .jsonl or .parquet, also as .gz"
_CACHED_BYTES = 32 << 20
"""Files up to this size are parsed once, and their rows kept."""
_REFUSED = (
    (b"PK\x03\x04", "is a spreadsheet or a zip archive; save the sheet as CSV, or unpack it"),
    (b"\xd0\xcf\x11\xe0", "is a spreadsheet; save it as CSV"),
    (b"SQLite format 3", "is an SQLite database; give sqlite:///PATH with --query to `tailrace import`"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; unpack it, or use gzip"),
    (b"ORC", "is an ORC file; write it as Parquet"),
    (b"Obj\x01", "is an Avro file; write it as Parquet"),
    (b"\x89HDF", "is an HDF5 file; write it as Parquet"),
    (b"\x80\x04", "is a pickle, which may run code; write it as Parquet"),
    (b"\x80\x05", "is a pickle, which may run code; write it as Parquet"),
    (b"%PDF", "is a PDF; save the table as CSV"),
    (b"\x89PNG", "is a picture; write the table as CSV"),
    (b"7z\xbc\xaf", "is a 7z archive; unpack it"),
    (b"Rar!", "is a RAR archive; unpack it"),
)
_MARKUP = (b"<!doctype", b"<html", b"<head", b"<meta", b"<table", b"<?xml")


class _Rows(Protocol):
    def __iter__(self) -> Iterator[RowBatch]: ...


class Table:
    """A file of rows.

    Attributes:
        name: The file's name, for errors.
        columns: Names in the file.
        first: The fields of the first line of a file without types, for tables without a header.
        second: The fields of the second line.
        sequences: Columns that hold lists separated by blanks, according to their header.
        has_header: Whether the names come from the file.
    """

    def __init__(
        self, path: Path, header: Sequence[str] | None, is_known: Callable[[str], bool], *, may_grow: bool = False
    ) -> None:
        """Read the file's first rows. `may_grow`: rows may be appended to it meanwhile.

        Raises DataError for an unreadable file, ConfigError for a header of another length.
        """
        self.name = path.name
        self._path, self._may_grow = path, may_grow
        self.first: tuple[str, ...] = ()
        self.second: tuple[str, ...] = ()
        self.sequences: frozenset[str] = frozenset()
        self.has_header, self.is_exact = True, False
        check_file(path)
        self._stamp = stamp_of(path)
        self._rows, self.columns = self._open(path, header, is_known)
        self._keeps = path.stat().st_size <= _CACHED_BYTES
        self._kept: list[RowBatch] | None = None

    def batches(self) -> Iterator[RowBatch]:
        """Yield all rows, always from the first. Raises DataError for a truncated file, and for one that changes."""
        if self._kept is not None:
            yield from self._kept
        elif self._keeps:
            rows = [*self._rows]
            self._check_unchanged()
            self._kept = rows
            yield from self._kept
        else:
            yield from self._rows
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise DataError if the file was replaced or rewritten since it was opened."""
        now, before = stamp_of(self._path), self._stamp
        has_grown = now is not None and before is not None and now[0] == before[0] and now[2] > before[2]
        if now != before and not (self._may_grow and has_grown):
            raise DataError("", f"{self.name} changed while it was read; import it again", "a file written to its end")

    def _open(
        self, path: Path, header: Sequence[str] | None, is_known: Callable[[str], bool]
    ) -> tuple[_Rows, tuple[str, ...]]:
        head = head_of(path)
        for magic, why in _REFUSED:
            if head.startswith(magic):
                raise DataError("", f"{self.name} {why}", KINDS)
        if head[257:262] == b"ustar":
            raise DataError("", f"{self.name} is a tar archive; unpack it", KINDS)
        if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_MARKUP):
            raise DataError("", f"{self.name} is HTML or XML; open it in a spreadsheet and save it as CSV", KINDS)
        if head.startswith(b"PAR1") or path.suffix in (".parquet", ".pq"):
            parquet = Columnar(path, is_parquet=True)
            return parquet, parquet.columns
        if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
            arrow = Columnar(path, is_parquet=False)
            return arrow, arrow.columns
        if head.lstrip(b"\xef\xbb\xbf\xff\xfe \t\r\n\0").startswith((b"{", b"[")) and path.suffix != ".csv":
            rows = JsonRows(path, is_known)
            return rows, rows.columns
        dialect = read_dialect(path, header, is_known)
        self.first, self.second, self.has_header = dialect.first, dialect.second, dialect.has_header
        self.sequences = dialect.sequences
        return Delimited(path, dialect), dialect.columns


def check_file(path: Path) -> None:
    """Raise DataError for a path that is not a file."""
    if path.is_dir():
        join = f"one file, as by polars.read_parquet('{path}/*.parquet').write_parquet('{path.stem}-whole.parquet')"
        raise DataError("", f"{path} is a folder", join, path)
    if address := re.match(r"(\w{2,}):/", str(path)):
        problem = f"{path.name} is at an address ({address[1]}:) and not on disk; download it first"
        raise DataError("", problem, "a path; `tailrace import` also reads s3://, gs://, az:// and databases", path)
    if not path.is_file():
        raise DataError("", f"no file {path}", KINDS, path)


class Frame:
    """Rows in memory as a table. An exact frame has our own ids, texts and lists, which stay as they are."""

    def __init__(self, rows: pl.DataFrame, name: str, *, is_exact: bool = False) -> None:
        self.name, self.columns, self.is_exact = name, tuple(rows.columns), is_exact
        self.first: tuple[str, ...] = ()
        self.second: tuple[str, ...] = ()
        self.sequences: frozenset[str] = frozenset()
        self.has_header = True
        self._rows = rows

    def batches(self) -> Iterator[RowBatch]:
        yield RowBatch(self._rows, pl.int_range(1, self._rows.height + 1, dtype=pl.Int64, eager=True))
