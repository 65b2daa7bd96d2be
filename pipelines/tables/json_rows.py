"""Rows of JSON: an object per line, an array of objects, or an object that holds such an array or objects by key.

Nested objects become columns such as `properties.rating`. A column whose values have one type keeps it; of integers and
other numbers it has numbers, of several types text, with numbers as written. A line that is not a JSON object is set
aside.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.tables.cells import members
from pipelines.tables.delimited import NO_TEXT, RowBatch
from pipelines.tables.encoding import CHUNK_BYTES, as_utf8, utf8_chunks
from services.errors import DataError

BATCH_ROWS = 65_536
_MAX_DEPTH = 3
_NUM_PROBED = 5
_INT_DIGITS = 18
_MAX_EXACT = 2**53
"""Larger integers are not all floating-point numbers."""
_LONG = "long"
_LOOKAHEAD, _MAX_OBJECT = 1 << 20, 1 << 28
"""Characters read ahead of an object, and the maximal length of an object."""
_NEXT_OBJECT = re.compile(r"\}\s*,?\s*\{")
_EXTENDED = frozenset({"$oid", "$date", "$numberLong", "$numberInt", "$numberDouble", "$numberDecimal"})
"""Keys under which MongoDB's exports give a value its type."""
_BLANK = re.compile(r"[\s,]*")
Read = tuple[int, dict[str, Any] | str]
"""The number of a row, and its values or the reason why it has none."""


class _Broken(str):
    """Why a row is not JSON; a text in the JSON is another string."""

    __slots__ = ()


class JsonRows:
    """Reads the batches of a file, always from the first row."""

    def __init__(self, path: Path, is_known: Callable[[str], bool]) -> None:
        self._path, self._is_known = path, is_known
        self._by_line = self._is_by_line()
        self._kinds: dict[str, set[str]] = {}
        first_reason = "no rows"
        for number, row in self._rows():
            if isinstance(row, str):
                first_reason = f"no row that can be used, such as row {number}: {row}" if number == 1 else first_reason
                continue
            for name, value in row.items():
                self._kinds.setdefault(name, set()).add(_kind(value))
        if not self._kinds:
            raise DataError("", f"{path.name} has {first_reason}", "a JSON object for each event or item")
        self.columns = tuple(self._kinds)

    def __iter__(self) -> Iterator[RowBatch]:
        rows = self._rows()
        while taken := [*islice(rows, BATCH_ROWS)]:
            good = [(number, row) for number, row in taken if isinstance(row, dict)]
            columns = {name: self._column(name, [row.get(name) for _, row in good]) for name in self.columns}
            aside = [(number, row) for number, row in taken if isinstance(row, str)]
            yield RowBatch(pl.DataFrame(columns), pl.Series([number for number, _ in good], dtype=pl.Int64), aside)

    def _column(self, name: str, values: list[Any]) -> pl.Series:
        kinds = self._kinds[name] - {"null"}
        kinds = {"float"} if kinds == {"int", "float"} else {"int"} if kinds == {"int", _LONG} else kinds
        if kinds == {"list"}:
            return pl.Series(name, [None if value is None else members(value) for value in values], pl.List(pl.String))
        dtype = next((dtype for kind, dtype in _DTYPES.items() if kinds == {kind}), pl.String)
        if dtype == pl.String:
            values = [_text(value) for value in values]
        return pl.Series(name, values, dtype=dtype)

    def _rows(self) -> Iterator[Read]:
        for number, value in _lines(self._path) if self._by_line else self._objects():
            if isinstance(value, _Broken):
                yield number, str(value)
            elif not isinstance(value, dict):
                yield number, "no JSON object"
            elif _has_half_pair(value):
                yield number, NO_TEXT
            else:
                yield number, _flat(value)

    def _is_by_line(self) -> bool:
        """Whether one of the first lines is a JSON object and a row by itself."""
        start = next(utf8_chunks(self._path), b"")
        lines = [line for line in start.split(b"\n")[: 10 * _NUM_PROBED] if line.strip()][:_NUM_PROBED]
        objects = [value for line in lines if isinstance(value := _parse(as_utf8(line)[0].decode()), dict)]
        return bool(objects) and not (len(lines) == 1 and self._wrapped(objects[0]) != objects)

    def _objects(self) -> Iterator[tuple[int, Any]]:
        """Yield the objects of an array or of concatenated JSON; a broken object, up to the next object, is one row."""
        decoder, number, texts = json.JSONDecoder(parse_int=_int), 1, _texts(self._path)
        text = next(texts, "").lstrip()
        at = int(text.startswith("["))
        while True:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]
            if len(text) - at < _LOOKAHEAD and (more := next(texts, None)) is not None:
                text, at = text[at:] + more, 0
                continue
            if at >= len(text) or text[at] == "]":
                return
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if len(text) - at < _MAX_OBJECT and (more := next(texts, None)) is not None:
                    text, at = text[at:] + more + "".join(islice(texts, len(text) // CHUNK_BYTES)), 0
                    continue
                value = _Broken("nested too deep" if isinstance(error, RecursionError) else "no JSON")
                match = _NEXT_OBJECT.search(text, at)
                at = len(text) if match is None else match.end() - 1
            for inner in self._wrapped(value) if number == 1 else (value,):
                yield number, inner
                number += 1

    def _wrapped(self, value: Any) -> list[Any]:
        """Return the rows in an object's only list, or of objects with the same keys, or any other value as it is."""
        if not isinstance(value, dict) or any(map(self._is_known, value)):
            return [value]
        lists = [inner for inner in value.values() if isinstance(inner, list) and inner and isinstance(inner[0], dict)]
        if len(lists) == 1:
            return lists[0]
        objects = [inner for inner in value.values() if isinstance(inner, dict)]
        if len(objects) == 1 and not lists and (rows := self._wrapped(objects[0])) != objects:
            return rows
        have_equal_keys = len(objects) == len(value) and len({frozenset(inner) for inner in objects}) == 1
        if have_equal_keys and sum(map(self._is_known, objects[0])) > 1:
            return objects
        if value and all(
            isinstance(inner, dict) and inner.keys() == {str(n) for n in range(len(inner))} for inner in value.values()
        ):
            raise DataError(
                "", f"{self._path.name} holds columns and not rows", 'df.to_json(path, orient="records", lines=True)'
            )
        return [value]


_DTYPES = {"int": pl.Int64, _LONG: pl.Int64, "float": pl.Float64, "bool": pl.Boolean}


def _kind(value: Any) -> str:
    if type(value) is int and abs(value) > _MAX_EXACT:
        return _LONG
    return "null" if value is None else type(value).__name__


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _flat(row: dict[str, Any], prefix: str = "", depth: int = 1) -> dict[str, Any]:
    """Return the values of nested objects by their path."""
    flat: dict[str, Any] = {}
    for name, typed in row.items():
        value = _untyped(typed)
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            flat |= _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            flat[f"{prefix}{name}"] = _text(value) if isinstance(value, dict) else value
    return flat


def _untyped(value: Any) -> Any:
    while isinstance(value, dict) and len(value) == 1 and value.keys() <= _EXTENDED:
        (value,) = value.values()
    return value


def _has_half_pair(value: dict[str, Any]) -> bool:
    """Whether a text holds half of a surrogate pair, which no encoding can represent."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _int(text: str) -> int | str:
    return int(text) if len(text) <= _INT_DIGITS else text


def _parse(text: str) -> Any:
    """Return a JSON value, or the reason why it is invalid; integers that are too long stay text."""
    try:
        return json.loads(text, parse_int=_int)
    except RecursionError:
        return _Broken("nested too deep")
    except ValueError:
        return _Broken("no JSON")


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    number, rest = 1, b""
    for chunk in (*utf8_chunks(path), b"\n"):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line.strip():
                text = as_utf8(line)[0]
                yield number, _Broken(NO_TEXT) if b"\0" in text else _parse(text.decode())
            number += 1


def _texts(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in utf8_chunks(path):
        yield decoder.decode(chunk)
