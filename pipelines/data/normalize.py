"""Raw tables as tools write them, made uniform before `schema` checks them. Pure; polars frames in and out.

    header      a column named `User ID` or `itemId` is user_id or item_id, where no other has the name
    ids         blanks around them are taken off; `nan`, `None` and the like are no id; `12.0` is 12

Whole numbers beside a missing value become floating-point numbers in many tools, in one table and not in the other: both tables are seen together,
so that items keep joining. Whatever was changed is in the notes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from pipelines.data.schema import EVENT_COLUMNS, ITEM_COLUMNS, Note
from services.errors import DataError

_IDS = {"user_id": "'u17'", "item_id": "'i42'"}
_STRIPPED = (*_IDS, "event_type")
_NO_IDS = ("nan", "NaN", "<NA>", "None", "null", "NULL")
_WHOLE = r"^(?:0|-?[1-9][0-9]*)\.0+$"
_FLOAT = r"^-?[0-9]+\.[0-9]+$|^-?[0-9](?:\.[0-9]+)?e\+[0-9]+$"
"""As tools print floating-point numbers; those with an exponent have lost digits."""
_LARGEST = 2.0**53
"""From here on not every whole number is a floating-point number."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A table as it was read: `kind` is events or items, and `name` the file's, for errors."""

    kind: str
    name: str
    rows: pl.DataFrame


def normalize(*tables: Raw) -> tuple[list[pl.DataFrame], list[Note]]:
    """Return the tables' rows with uniform headers and ids, and what was changed. Raises DataError for ids that are floating-point numbers."""
    notes: list[Note] = []
    frames = [_with_known_names(table, notes) for table in tables]
    frames = [_stripped(table.kind, _as_text(table, frame), notes) for table, frame in zip(tables, frames, strict=True)]
    for column in _IDS:
        frames = _whole_numbers(column, tables, frames, notes)
    for table in tables:
        _note_commas(table, notes)
    return frames, notes


def _with_known_names(table: Raw, notes: list[Note]) -> pl.DataFrame:
    names: dict[str, str] = {}
    for known in EVENT_COLUMNS if table.kind == "events" else ITEM_COLUMNS:
        alike = [name for name in table.rows.columns if _letters(name) == _letters(known)]
        if known in alike or not alike:
            continue
        if len(alike) > 1:
            raise DataError(known, f"there as {' and '.join(map(repr, alike))} in {table.name}", f"one named {known}")
        names[alike[0]] = known
        notes.append(Note(table.kind, f"column {alike[0]!r} is read as {known}"))
    return table.rows.rename(names)


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def _as_text(table: Raw, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with ids that are floating-point numbers as text, such as 12.0, and other kinds of text as plain text."""
    for column in set(_STRIPPED) & set(frame.columns):
        values = frame[column]
        if values.dtype.is_float() and column in _IDS:
            values = values.fill_nan(None)
            broken = values.filter((values != values.round()) | (values.abs() >= _LARGEST))
            if len(broken):
                raise _no_ids(column, broken[0], table.name)
            values = values.cast(pl.Int64).cast(pl.String) + ".0"
        elif values.dtype in (pl.Categorical, pl.Enum, pl.Decimal):
            values = values.cast(pl.String)
        frame = frame.with_columns(values)
    return frame


def _note_commas(table: Raw, notes: list[Note]) -> None:
    """Note categories that seem to be lists parted by commas; one may have a comma in its name, so they stay whole."""
    if table.kind != "items" or table.rows.schema.get("categories") != pl.String:
        return
    values = table.rows["categories"].drop_nulls()
    parted = values.filter(values.str.contains(",", literal=True))
    if len(parted) and not values.str.contains("|", literal=True).any():
        what = f"{len(parted)} values of column categories hold a comma and are one category each; part several by |"
        notes.append(Note("items", what, parted[0]))


def _no_ids(column: str, example: object, name: str) -> DataError:
    written = f"of floating-point numbers, such as {example}, in {name}"
    return DataError(column, f"{written}; write the ids as text or integers", _IDS[column])


def _stripped(kind: str, frame: pl.DataFrame, notes: list[Note]) -> pl.DataFrame:
    """Return the frame without blanks around ids and types, and without words for a missing value."""
    for column in _STRIPPED:
        if column not in frame.columns or frame[column].dtype != pl.String:
            continue
        before = frame[column]
        after = before.str.strip_chars()
        num_blank = (before != after).sum()
        if num_blank:
            notes.append(
                Note(kind, f"{num_blank} values of column {column} have blanks around them, which are taken off")
            )
        if column in _IDS and (missing := after.is_in(_NO_IDS)).any():
            what = f"{missing.sum()} values of column {column} are words for a missing one"
            notes.append(Note(kind, what, after.filter(missing)[0]))
            after = after.set(missing, None)
        frame = frame.with_columns(after.set(after == "", None))
    return frame


def _whole_numbers(
    column: str, tables: Sequence[Raw], frames: Sequence[pl.DataFrame], notes: list[Note]
) -> list[pl.DataFrame]:
    """Return the frames with ids such as 12.0 as 12, unless the tables have such as 12.5 too. Raises DataError where a column has no other kind."""
    texts = {place: frame[column] for place, frame in enumerate(frames) if frame.schema.get(column) == pl.String}
    has_fractions = False
    for place, values in texts.items():
        distinct = values.drop_nulls().unique(maintain_order=True)
        is_float = distinct.str.contains(_FLOAT)
        fractions = distinct.filter(is_float & ~distinct.str.contains(_WHOLE))
        if len(fractions) and is_float.all():
            raise _no_ids(column, fractions[0], tables[place].name)
        has_fractions |= len(fractions) > 0
    found = list(frames)
    for place, values in texts.items():
        is_whole = values.str.contains(_WHOLE)
        if (num_whole := is_whole.sum()) == 0:
            continue
        what, example = f"{num_whole} ids of column {column}", values.filter(is_whole)[0]
        if has_fractions:
            what = f"{what} look like floating-point numbers, and others have fractions: all stay as they are written"
            notes.append(Note(tables[place].kind, what, example))
            continue
        whole = pl.when(pl.col(column).str.contains(_WHOLE)).then(pl.col(column).str.replace(r"\.0+$", ""))
        found[place] = frames[place].with_columns(whole.otherwise(column).alias(column))
        what = f"{what} are written as floating-point numbers and read as integers"
        notes.append(Note(tables[place].kind, what, f"{example} as {example.partition('.')[0]}"))
    return found
