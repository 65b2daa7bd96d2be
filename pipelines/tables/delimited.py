"""Rows of text with a separator: polars parses well-formed stretches, and broken quotes are read line by line.

Counting bytes decides which stretches are well formed. A row is set aside with its number (the header is row 1) if its
number of fields differs from the header's, if it has an unclosed quote, or if its bytes are not text. A quote inside a
field is kept as written. The length of a quoted field is bounded, so an unclosed quote costs only its own row.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import polars as pl

from pipelines.tables.encoding import as_utf8, utf8_chunks
from pipelines.tables.options import UNNAMED
from services.errors import ConfigError, DataError

SEPARATORS = ("::", "\t", "\x01", ";", "|", ",")
"""In order of preference if several fit."""
NO_TEXT = "bytes that are not text"
OPEN_QUOTE = "a quote that is not closed"
_MAX_RECORD_BYTES = 1 << 20
_MAX_RECORD_LINES = 2_000
_STAND_IN = b"\x1f"
"""Replaces a separator of two characters."""
_NUM_PROBED = 20
_TYPED = re.compile(r"^(.+):(token|float|token_seq|float_seq)$")
"""A column of RecBole's atomic files, which has its type in its name."""


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows as written: columns by file name, the row numbers, and the rows set aside with their reason."""

    frame: pl.DataFrame
    rows: pl.Series
    set_aside: Sequence[tuple[int, str]] = ()
    notes: Sequence[tuple[str, int, str]] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """The layout of a file.

    Args:
        columns: Names by position.
        first: The fields of the first line, which are data where `has_header` is False.
        second: The fields of the second line.
        sequences: Columns that hold lists separated by blanks, according to their header.
        skipped_lines: Lines before the header.
        preamble: The first of these lines that has text, such as a report's title; "" if none has.
        is_padded: Whether a blank follows each separator, so that a quote may follow it.
    """

    separator: str
    columns: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...]
    sequences: frozenset[str]
    has_header: bool
    skipped_lines: int
    preamble: str = ""
    is_padded: bool = False


def read_dialect(path: Path, header: Sequence[str] | None, is_known: Callable[[str], bool]) -> Dialect:
    """Detect separator and names from the first lines.

    Raises DataError for an empty file, ConfigError for a header of another length.
    """
    lines = [*islice(_lines(path), _NUM_PROBED + 1)]
    skipped, separator = 0, ""
    while lines and (not lines[0].strip() or (declaration := re.fullmatch(r"sep=(.)", lines[0].strip()))):
        separator = declaration[1] if lines[0].strip() and declaration else separator
        lines, skipped = lines[1:], skipped + 1
    if not lines:
        raise DataError("", f"{path.name} has no rows", "a file with a row for each event or item")
    preamble: Sequence[str] = () if header is not None else _preamble(lines, is_known)
    lines, skipped = lines[len(preamble) :], skipped + len(preamble)
    separator = separator or _detect(lines, is_known)
    header_fields = _fields(lines[0], separator) or ()
    if is_padded := len(header_fields) > 1 and all(name.startswith(" ") for name in header_fields[1:]):
        lines = [line.replace(f'{separator} "', f'{separator}"') for line in lines]
    fields = [_fields(line, separator) or () for line in lines]
    first, second = fields[0], fields[1] if len(fields) > 1 else ()
    if header is not None:
        if len(header) != len(first):
            shown = separator.join(first)[:120]
            raise ConfigError(
                f"--header: {len(header)} names for {len(first)} fields in {path.name} ({shown}); name each, "
                f"{UNNAMED} skips one"
            )
        names = tuple(f"{UNNAMED}{position}" if name == UNNAMED else name for position, name in enumerate(header, 1))
        return Dialect(separator, names, first, second, frozenset(), has_header=False, skipped_lines=skipped)
    if any(re.search(r"[\x00\x02-\x08\x0e-\x1f]", name) for name in first):
        raise DataError("", f"{path.name} is not text", "CSV, JSON or Parquet")
    if len(first) > 1 and all(len(name) > 1 and name[0] == name[-1] == "'" for name in first):
        raise DataError("", f"{path.name} has its fields in single quotes; write double quotes or none", '"user_id"')
    named = first
    others = [row for row in fields[1:] if any(row)]
    if others and all(len(row) == len(first) + 1 and row[-1] for row in others):
        named = ("", *first)  # R's write.table leaves the column of row names unnamed
    typed = [_TYPED.match(name) for name in named]
    sequences = (
        frozenset(match[1] for match in typed if match and match[2].endswith("_seq")) if all(typed) else frozenset()
    )
    if all(typed):
        named = tuple(match[1] for match in typed if match)
    return Dialect(
        separator,
        _distinct(named),
        first,
        second,
        sequences,
        has_header=True,
        skipped_lines=skipped,
        preamble=next((line for line in preamble if line.strip()), ""),
        is_padded=is_padded,
    )


class Delimited:
    """Reads the batches of a file, always from the first row."""

    def __init__(self, path: Path, dialect: Dialect) -> None:
        self._path = path
        self.dialect = dialect
        width = len(dialect.separator.encode())
        self._separator = dialect.separator.encode() if width == 1 else _STAND_IN
        self._quotes = width == 1

    def __iter__(self) -> Iterator[RowBatch]:
        row, is_first, rest, replaces_cr = 1, True, b"", None
        skip = self.dialect.skipped_lines + self.dialect.has_header
        for chunk, is_last in _with_last(utf8_chunks(self._path)):
            data = rest + chunk
            if replaces_cr is None:
                replaces_cr = b"\n" not in data and b"\r" in data
            if b"\r" in data:
                ends, data = (data[-1:], data[:-1]) if data.endswith(b"\r") and not is_last else (b"", data)
                data = data.replace(b"\r\n", b"\n")
                data = (data.replace(b"\r", b"\n") if replaces_cr else data) + ends
            cut = len(data) if is_last else data.rfind(b"\n") + 1
            data, rest = data[:cut], data[cut:]
            if is_first and data:
                for _ in range(skip):
                    data = data.partition(b"\n")[2]
                row, is_first = skip + 1, False
            if data:
                batch, num_rows, left = self._parse(data, row, is_last=is_last)
                row, rest = row + num_rows, left + rest
                if len(batch.rows) or batch.set_aside:
                    yield batch

    def _parse(self, data: bytes, row: int, *, is_last: bool) -> tuple[RowBatch, int, bytes]:
        """Return the batch, its number of rows, and the remaining data, which belongs to an incomplete row."""
        data, num_other, _ = as_utf8(data)
        notes = [("{n} rows are not UTF-8 and are read as Windows-1252", num_other, "")] if num_other else []
        dialect = self.dialect
        if dialect.preamble and row == dialect.skipped_lines + 2:
            notes.append(("{n} lines before the header are skipped", dialect.skipped_lines, dialect.preamble[:60]))
        if dialect.is_padded:
            data = data.replace(self._separator + b' "', self._separator + b'"')
        if len(self.dialect.separator) > 1:
            data = data.replace(_STAND_IN, b" ").replace(self.dialect.separator.encode(), _STAND_IN)
        if b"\0" in data or (spans := _spans(data, self._separator, self._quotes)) is None:
            return self._by_line(data, row, notes, is_last=is_last)
        starts, ends, counts, is_open = spans
        rest = b""
        if is_open:
            begun = int(ends[-1]) + 1 if len(ends) else 0
            if is_last or len(data) - begun > _MAX_RECORD_BYTES:
                return self._by_line(data, row, notes, is_last=is_last)
            data, rest = data[:begun], data[begun:]
        width = len(self.dialect.columns)
        is_blank = ends <= starts
        is_good = (counts == width) & ~is_blank
        numbers = np.arange(row, row + len(starts), dtype=np.int64)
        content = data
        set_aside: list[tuple[int, str]] = []
        if not is_good.all():
            content, is_good, set_aside = self._without_ragged(data, starts, ends, counts, is_good, is_blank, numbers)
        parsed = self._frame(content, int(is_good.sum()))
        if parsed is None:
            batch, num_rows, more = self._by_line(data, row, notes, is_last=is_last)
            return batch, num_rows, more + rest
        return RowBatch(parsed, pl.Series(numbers[is_good]), set_aside, notes), len(starts), rest

    def _without_ragged(
        self,
        data: bytes,
        starts: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        is_good: np.ndarray,
        is_blank: np.ndarray,
        numbers: np.ndarray,
    ) -> tuple[bytes, np.ndarray, list[tuple[int, str]]]:
        """Return the data without blank and ragged rows, the mask of kept rows, and the rows set aside.

        Empty fields after the last column do not count.
        """
        width, is_good, set_aside = len(self.dialect.columns), is_good.copy(), []
        shortened: dict[int, bytes] = {}
        for row in np.flatnonzero(~is_good & ~is_blank).tolist():
            line, surplus = data[starts[row] : ends[row]], int(counts[row]) - width
            if surplus > 0 and line.endswith(self._separator * surplus) and b'"' not in line:
                shortened[row] = line[:-surplus]
                is_good[row] = True
            else:
                set_aside.append((int(numbers[row]), self._ragged(int(counts[row]))))
        good = np.flatnonzero(is_good)
        parts: list[bytes] = []
        for group in np.split(good, np.flatnonzero(np.diff(good) != 1) + 1) if len(good) else []:
            parts += _runs(data, starts, ends, group, shortened)
        return b"".join(parts), is_good, set_aside

    def _ragged(self, num_fields: int) -> str:
        width = len(self.dialect.columns)
        fields = "field" if num_fields == 1 else "fields"
        than = "the header has" if self.dialect.has_header else "--header names"
        return f"{num_fields} {fields} where {than} {width}"

    def _frame(self, content: bytes, num_rows: int) -> pl.DataFrame | None:
        """Parse well-formed rows; None if polars finds another number of rows."""
        columns = self.dialect.columns
        schema = dict.fromkeys(columns, pl.String)
        if not num_rows:
            return pl.DataFrame(schema=schema)
        try:
            frame = pl.read_csv(
                io.BytesIO(content),
                has_header=False,
                separator=self._separator.decode(),
                quote_char='"' if self._quotes and b'"' in content else None,
                schema=schema,
                infer_schema=False,
            )
        except pl.exceptions.PolarsError:
            return None
        return frame if frame.height == num_rows else None

    def _by_line(
        self, data: bytes, row: int, notes: Sequence[tuple[str, int, str]], *, is_last: bool
    ) -> tuple[RowBatch, int, bytes]:
        """Read rows line by line, around a broken quote."""
        columns, separator = self.dialect.columns, self._separator.decode()
        lines = data.decode().split("\n")
        if lines and not lines[-1]:
            lines.pop()
        at, number = 0, row
        read: list[list[str]] = []
        rows: list[int] = []
        set_aside: list[tuple[int, str]] = []
        fields: list[str] | None
        while at < len(lines):
            taken, fields, why = _record(lines, at, separator, len(columns), quotes=self._quotes, is_last=is_last)
            if taken == 0:
                break
            if fields is not None and len(fields) != len(columns):
                why, fields = self._ragged(len(fields)), None
            if fields is not None:
                read.append(fields)
                rows.append(number)
            elif why:
                set_aside.append((number, why))
            at, number = at + taken, number + 1
        frame = pl.DataFrame(
            {
                name: pl.Series([fields[index] or None for fields in read], dtype=pl.String)
                for index, name in enumerate(columns)
            }
        )
        rest = "\n".join(lines[at:]).encode()
        if rest and data.endswith(b"\n"):
            rest += b"\n"
        return RowBatch(frame, pl.Series(rows, dtype=pl.Int64), set_aside, notes), number - row, rest


def _runs(
    data: bytes, starts: np.ndarray, ends: np.ndarray, group: np.ndarray, shortened: dict[int, bytes]
) -> Iterator[bytes]:
    """Yield the bytes of adjacent rows, each with its line end."""
    first = int(group[0])
    for row in (*(row for row in group.tolist() if row in shortened), None):
        last = int(group[-1]) + 1 if row is None else row
        if last > first:
            yield data[starts[first] : ends[last - 1]] + b"\n"
        if row is not None:
            yield shortened[row] + b"\n"
            first = row + 1


def _spans(data: bytes, separator: bytes, quotes: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool] | None:
    """Return start, end and number of fields of each row, and whether the last row ends inside a quote.

    None for a misplaced quote.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    is_separator, is_end = raw == separator[0], raw == 10
    is_open = False
    if quotes and b'"' in data:
        is_quote = raw == 34
        inside = np.bitwise_xor.accumulate(is_quote.view(np.uint8)).view(bool)
        at = np.flatnonzero(is_quote)
        opens, closes = at[::2], at[1::2]
        before = raw[np.maximum(opens - 1, 0)]
        after = raw[np.minimum(closes + 1, len(raw) - 1)]
        may_open = (opens == 0) | (before == separator[0]) | (before == 10) | (before == 34)
        may_close = (closes + 1 == len(raw)) | (after == separator[0]) | (after == 10) | (after == 34)
        if not (may_open.all() and may_close.all()):
            return None
        is_separator &= ~inside
        is_end &= ~inside
        is_open = len(at) % 2 == 1
    ends = np.flatnonzero(is_end)
    if not is_open and (not len(ends) or ends[-1] != len(raw) - 1):
        ends = np.append(ends, len(raw))
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    if len(ends) and (ends - starts).max() > _MAX_RECORD_BYTES:
        return None
    before_end = np.searchsorted(np.flatnonzero(is_separator), ends)
    counts = np.diff(np.concatenate([[0], before_end])) + 1
    return starts.astype(np.int64), ends.astype(np.int64), counts, is_open


def _record(
    lines: Sequence[str], at: int, separator: str, width: int, *, quotes: bool, is_last: bool
) -> tuple[int, list[str] | None, str]:
    """Return the number of lines of a row, its fields or None, and the reason why it cannot be read.

    0 lines: the row continues after the last line. A blank line has neither fields nor a reason.
    """
    line = lines[at]
    if not line:
        return 1, None, ""
    if "\0" in line:
        return 1, None, NO_TEXT
    if not quotes or '"' not in line:
        return 1, _shortened(line.split(separator), width), ""
    most = _lines_of_a_record(lines, at)
    reader = csv.reader((f"{text}\n" for text in lines[at:most]), delimiter=separator, strict=True)
    try:
        fields = next(reader)
    except csv.Error as error:
        is_open = "unexpected end" in str(error)
        if is_open and most == len(lines) and not is_last:
            return 0, None, ""
        return _literal(line, separator, width, OPEN_QUOTE if is_open or reader.line_num > 1 else "")
    if reader.line_num > 1 and len(fields) != width:
        return _literal(line, separator, width, OPEN_QUOTE)
    return reader.line_num, _shortened(fields, width), ""


def _lines_of_a_record(lines: Sequence[str], at: int) -> int:
    """Return the end of the lines that a row may span."""
    end, size = at, 0
    while end < min(len(lines), at + _MAX_RECORD_LINES) and size <= _MAX_RECORD_BYTES:
        size += len(lines[end]) + 1
        end += 1
    return end


def _literal(line: str, separator: str, width: int, why: str) -> tuple[int, list[str] | None, str]:
    """Read a line with literal quotes: as written, or escaped by a backslash."""
    if "\\" in line and (escaped := _fields(line, separator, escape="\\")) is not None and len(escaped) == width:
        return 1, [*escaped], ""
    fields = _shortened(line.split(separator), width)
    if len(fields) == width and not why:
        return 1, fields, ""
    lenient = _fields(line, separator)
    if lenient is not None and len(lenient) == width and not why:
        return 1, [*lenient], ""
    return 1, None if why else fields, why


def _shortened(fields: list[str], width: int) -> list[str]:
    """Return the fields without empty fields after the last column."""
    return fields[:width] if len(fields) > width and not any(fields[width:]) else fields


def _lines(path: Path) -> Iterator[str]:
    """Yield the first lines of a file, decoded."""
    start = b""
    for chunk in utf8_chunks(path):
        start += chunk
        if start.count(b"\n") > _NUM_PROBED or len(start) > _MAX_RECORD_BYTES:
            break
    start = start.replace(b"\r\n", b"\n")
    if b"\n" not in start:
        start = start.replace(b"\r", b"\n")
    yield from as_utf8(start)[0].decode().split("\n")


def _fields(line: str, separator: str, escape: str | None = None) -> tuple[str, ...] | None:
    """Return the fields of a line, leniently; with an escape character strictly, None if the line does not fit."""
    if len(separator) > 1:
        return tuple(line.split(separator))
    is_strict = escape is not None
    try:
        rows = [
            *csv.reader([line], delimiter=separator, strict=is_strict, escapechar=escape, doublequote=not is_strict)
        ]
    except csv.Error:
        return None if is_strict else tuple(line.split(separator))
    return tuple(rows[0]) if rows else ()


def _preamble(lines: Sequence[str], is_known: Callable[[str], bool]) -> Sequence[str]:
    """Return the lines before a header of at least two known names, if they are comments or have one cell each."""
    for number, line in enumerate(lines):
        fields = (_fields(line, _detect([line], is_known)) or ()) if line.strip() else ()
        if sum(map(is_known, fields)) > 1:
            return lines[:number]
        if not line.startswith("#") and sum(map(bool, map(str.strip, fields))) > 1:
            return ()
    return ()


def _detect(lines: Sequence[str], is_known: Callable[[str], bool]) -> str:
    """Return the header's separator, by known names, then by lines of the same number of fields, then by preference."""
    probed = [line for line in lines if line.strip()]
    best, best_score = ",", (-1, -1.0)
    for separator in SEPARATORS:
        fields = [_fields(line, separator) or () for line in probed]
        if len(fields[0]) < 2:
            continue
        num_known = sum(is_known(name) for name in fields[0])
        same = sum(len(row) == len(fields[0]) for row in fields[1:]) / max(1, len(fields) - 1)
        score = (num_known, same)
        if score > best_score:
            best, best_score = separator, score
    return best


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names; empty and repeated names carry their position."""
    positions: dict[str, int] = {}
    for position, name in enumerate((name.strip() for name in names), 1):
        positions[f"{name} (column {position})" if name in positions or not name else name] = position
    return tuple(positions)


def _with_last(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each chunk, and whether it is the last."""
    before = next(chunks, None)
    for chunk in chunks:
        if before is not None:
            yield before, False
        before = chunk
    if before is not None:
        yield before, True
