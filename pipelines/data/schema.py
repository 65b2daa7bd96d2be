"""What a raw table must be: which columns, and which rows cannot be used and why. Pure; polars frames in and out.

A missing column, or one in which not one row can be read, is a mistake of the table and stops the pipeline. Single bad rows are set aside with a
reason instead. Exact duplicates are dropped before anything is counted; a value that is no number costs the value, and a missing title the title.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import polars as pl

from services.contracts.recommend import MAX_ID_CHARS
from services.errors import DataError

UTC_US = pl.Datetime("us", "UTC")
_FIRST_TIME, _END_OF_TIMES = datetime(1970, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
"""Times outside are a clock's or a column's mistake, and later ones no feature table can hold."""
_LAST_UNIX_SECOND = 100_000_000_000
"""Numbers below this are Unix seconds, from it on Unix milliseconds."""

_EVENT_EXAMPLES = {
    "user_id": "'u17'",
    "item_id": "'i42'",
    "event_time": "'2026-11-21T12:00:00Z' or 1795262400 (Unix seconds) or 1795262400000 (Unix milliseconds)",
}
_ITEM_EXAMPLES = {"item_id": "'i42'", "title": "'Toy Story (1995)'"}
_OPTIONAL_EXAMPLES = {
    "event_type": "'click'",
    "value": "1.0",
    "event_id": "'e7'",
    "categories": "'Drama|War'",
    "text": "'A toy cowboy.'",
}
EVENT_COLUMNS = (*_EVENT_EXAMPLES, "event_type", "value", "event_id")
ITEM_COLUMNS = (*_ITEM_EXAMPLES, "categories", "text")
_UNREAD = "unread_value"


@dataclass(frozen=True, slots=True)
class Note:
    """What was changed or is odd in a table (`kind` is events, items or live log), and an example from it, which may name a user."""

    kind: str
    what: str
    example: str = ""

    def __str__(self) -> str:
        """Return a sentence."""
        return f"{self.kind}: {self.what}" + (f", such as {self.example}" if self.example else "")


@dataclass(frozen=True, slots=True)
class Checked:
    """The rows that can be used, in their order, and those set aside as text columns with a `reason`; both without exact duplicates."""

    good: pl.DataFrame
    rejected: pl.DataFrame
    num_duplicates: int = 0
    num_unread_values: int = 0
    notes: tuple[Note, ...] = ()


def check_items(raw: pl.DataFrame, table: str = "items") -> Checked:
    """Return items as (item_id, title, categories list, text). Of an item's rows the first with a title stays; without one the title is the id.

    Raises DataError, which names `table`.
    """
    _require(raw, _ITEM_EXAMPLES, table)
    title = _text(raw, "title")
    title = pl.when(title.str.strip_chars() != "").then(title)
    text = _text(raw, "text", default=title)
    typed = raw.select(item_id=_text(raw, "item_id"), title=title, categories=_categories(raw), text=text)
    bad = pl.when(_bad_id("item_id")).then(pl.lit("item_id"))
    raw, typed, equal = _distinct(raw, typed, bad.is_null())
    by_title = typed.with_row_index("row").sort(pl.col("title").is_null(), maintain_order=True)
    stays = by_title.unique("item_id", keep="first", maintain_order=True)["row"]
    reason = bad.when(~pl.int_range(pl.len()).is_in(stays.implode())).then(pl.lit("item_id repeated"))
    good, rejected = _split(raw, typed, reason, _ITEM_EXAMPLES, table)
    untitled = good.filter(pl.col("title").is_null())
    notes = (
        *_note("items", equal, "exact duplicates are dropped", ("item_id",)),
        *_note("items", untitled, "without a title are kept under their id", ("item_id",)),
    )
    return Checked(good.with_columns(pl.col("title").fill_null(pl.col("item_id"))), rejected, equal.height, 0, notes)


def check_events(raw: pl.DataFrame, known_items: pl.Series, table: str = "events", kept: Sequence[str] = ()) -> Checked:
    """Return events as (user_id, item_id, event_time, event_type, value) in file order, and with them the columns `kept`.

    Rows that are equal in all of these are one event. Raises DataError, which names `table`.
    """
    _require(raw, _EVENT_EXAMPLES, table)
    number = _number(raw, "value")
    typed = raw.select(
        user_id=_text(raw, "user_id"),
        item_id=_text(raw, "item_id"),
        event_time=_time(raw),
        event_type=_text(raw, "event_type", default=pl.lit("interaction")).fill_null("interaction"),
        value=pl.when(number.is_finite()).then(number).otherwise(1.0),
        **{name: _text(raw, name) if name == "event_id" else pl.col(name) for name in kept},
        **{_UNREAD: pl.when(number.is_infinite() | number.is_null()).then(_text(raw, "value"))},
    )
    reason = (
        pl.when(_bad_id("user_id"))
        .then(pl.lit("user_id"))
        .when(_bad_id("item_id"))
        .then(pl.lit("item_id"))
        .when(pl.col("event_time").is_null())
        .then(pl.lit("event_time"))
        .when(~pl.col("item_id").is_in(known_items.implode()))
        .then(pl.lit("item_id not in items"))
    )
    raw, typed, equal = _distinct(raw, typed, reason.is_null())
    good, rejected = _split(raw, typed, reason, _EVENT_EXAMPLES, table)
    unread = good.filter(pl.col(_UNREAD).str.strip_chars() != "").with_columns(value=_UNREAD)
    return Checked(good.drop(_UNREAD), rejected, equal.height, unread.height, _event_notes(good, equal, unread))


def users_and_times(raw: pl.DataFrame) -> pl.DataFrame:
    """Return user_id and event_time of a raw table of events, row by row, null where they cannot be read. Raises DataError for a missing column."""
    _require(raw, _EVENT_EXAMPLES, "events")
    return raw.select(user_id=_text(raw, "user_id"), event_time=_time(raw))


def _event_notes(good: pl.DataFrame, equal: pl.DataFrame, unread: pl.DataFrame) -> tuple[Note, ...]:
    """Return what is said of the rows that were dropped as `equal`, differ in the value alone, or have an `unread` value."""
    place = ("user_id", "item_id", "event_time")
    dropped = "exact duplicates (same user, item, time, type and value) are dropped"
    advice = "a finer event_time or an event_id would tell real repeats apart"
    by_value = good.filter(~pl.struct(pl.exclude("value", _UNREAD)).is_first_distinct())
    return (
        *_note("events", equal, f"{dropped}; {advice}", place),
        *_note("events", by_value, "that differ from another row in the value alone are kept", place),
        *_note("events", unread, "with a value that is no number count with the value 1", (*place, "value")),
    )


def order_events(events: pl.DataFrame) -> pl.DataFrame:
    """Sort by time, ties by row, and move ties within a user apart by microseconds, so that each user's times rise strictly."""
    ordered = events.with_row_index("row").sort("user_id", "event_time", "row")
    place = pl.int_range(pl.len(), dtype=pl.Int64).over("user_id")
    micros = pl.col("event_time").dt.epoch("us")
    risen = ((micros - place).cum_max().over("user_id") + place).cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
    return ordered.with_columns(event_time=risen).sort("event_time", "user_id").drop("row")


def _require(raw: pl.DataFrame, examples: dict[str, str], table: str) -> None:
    for column, example in examples.items():
        if column not in raw.columns:
            raise DataError(column, f"missing among {', '.join(raw.columns)} in {table}", example)
    for column, example in (examples | _OPTIONAL_EXAMPLES).items():
        if column in raw.columns and not _is_plain(raw[column], may_be_list=column == "categories"):
            raise DataError(column, f"of type {raw[column].dtype} in {table}", example)
        if column in ("user_id", "item_id") and raw[column].dtype.is_float():
            written = "of floating-point numbers, so 17 would be the id '17.0'"
            raise DataError(column, f"{written} in {table}; write the ids as text or integers", example)


def _is_plain(column: pl.Series, *, may_be_list: bool) -> bool:
    """Whether a column holds single values, or lists of them where it may; bytes are text when they are UTF-8."""
    inner = column.dtype.inner if may_be_list and isinstance(column.dtype, pl.List) else column.dtype
    try:
        return (
            inner != pl.Object and not inner.is_nested() and (inner != pl.Binary or bool(column.cast(pl.String).len()))
        )
    except pl.exceptions.PolarsError:
        return False


def _distinct(
    raw: pl.DataFrame, typed: pl.DataFrame, is_usable: pl.Expr
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return both without exact duplicates, and the rows of `typed` that were dropped.

    Usable rows are compared by what is read of them, and the others, which have no identity, by all that is written.
    """
    usable = typed.select(is_usable).to_series()
    as_written = raw.filter(~usable).select(pl.all().map_batches(_shown, return_dtype=pl.String))
    is_first = np.empty(raw.height, dtype=bool)
    is_first[usable] = typed.filter(usable).select(pl.struct(pl.exclude(_UNREAD)).is_first_distinct()).to_series()
    is_first[~usable] = as_written.select(pl.struct(pl.all()).is_first_distinct()).to_series()
    stays = pl.Series(is_first)
    return raw.filter(stays), typed.filter(stays), typed.filter(~stays)


def _note(kind: str, rows: pl.DataFrame, what: str, named: Sequence[str]) -> list[Note]:
    """Return a note on these rows with the first as an example; none without rows."""
    example = ", ".join(f"{name}={rows[name][0]}" for name in named) if len(rows) else ""
    return [Note(kind, f"{rows.height} {what}", example)] if len(rows) else []


def _split(
    raw: pl.DataFrame, typed: pl.DataFrame, reason: pl.Expr, examples: dict[str, str], table: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows without a reason as they are typed, and the others as text, with theirs."""
    reasons = typed.select(reason=reason)["reason"]
    counts = reasons.drop_nulls().value_counts()
    for column, count in counts.iter_rows():
        if count == raw.height and column in examples:
            raise DataError(column, f"not one row can be used, such as {raw[column][0]!r} in {table}", examples[column])
    as_text = raw.filter(reasons.is_not_null()).select(pl.all().map_batches(_shown, return_dtype=pl.String))
    return typed.filter(reasons.is_null()), as_text.with_columns(reason=reasons.drop_nulls())


def _shown(column: pl.Series) -> pl.Series:
    return pl.Series(column.name, [None if value is None else str(value) for value in column], dtype=pl.String)


def _bad_id(name: str) -> pl.Expr:
    """What the doors would refuse too: empty, too long, or not printable."""
    length = pl.col(name).str.len_chars()
    unprintable = pl.col(name).str.contains(r"\p{C}|[\p{Z}--\x20]")
    return length.is_null() | (length == 0) | (length > MAX_ID_CHARS) | unprintable


def _text(raw: pl.DataFrame, name: str, default: pl.Expr | None = None) -> pl.Expr:
    if name not in raw.columns:
        return (pl.lit(None, pl.String) if default is None else default).alias(name)
    column = pl.col(name).fill_nan(None) if raw[name].dtype.is_float() else pl.col(name)
    return column.cast(pl.String)


def _categories(raw: pl.DataFrame) -> pl.Expr:
    """A list column as it is; a text column split at `|`."""
    if "categories" not in raw.columns:
        return pl.lit([], pl.List(pl.String))
    column = pl.col("categories")
    if raw["categories"].dtype != pl.List:
        column = column.cast(pl.String).str.split("|")
    names = column.cast(pl.List(pl.String)).list.eval(pl.element().str.strip_chars())
    return names.list.filter(pl.element().is_not_null() & (pl.element() != "")).fill_null([])


def _number(raw: pl.DataFrame, name: str) -> pl.Expr:
    """The column as numbers; null where it holds none or is missing."""
    if name not in raw.columns:
        return pl.lit(None, pl.Float64)
    column = pl.col(name)
    return (column.str.strip_chars() if raw[name].dtype == pl.String else column).cast(pl.Float64, strict=False)


def _time(raw: pl.DataFrame) -> pl.Expr:
    """Read times in any of their forms; null where there is none, or one before 1970 or from 2100 on."""
    time = _any_time(raw)
    return pl.when(time.is_between(_FIRST_TIME, _END_OF_TIMES, closed="left")).then(time)


def _any_time(raw: pl.DataFrame) -> pl.Expr:
    """Datetimes (naive ones are UTC), numbers by their size, text as either ISO 8601 or a number."""
    column, dtype = pl.col("event_time"), raw["event_time"].dtype
    if isinstance(dtype, pl.Datetime):
        aware = column if dtype.time_zone else column.dt.replace_time_zone("UTC")
        return aware.dt.convert_time_zone("UTC").cast(UTC_US)
    if dtype.is_numeric():
        return _from_number(column)
    words = column.cast(pl.String).str.strip_chars()
    return pl.coalesce(_from_number(words.cast(pl.Float64, strict=False)), _from_iso(words))


def _from_number(number: pl.Expr) -> pl.Expr:
    seconds = pl.when(number < _LAST_UNIX_SECOND).then(number).otherwise(number / 1000)
    usable = seconds.is_between(0, _LAST_UNIX_SECOND / 10)
    micros = pl.when(usable).then((seconds * 1_000_000).round())
    return micros.cast(pl.Int64).cast(pl.Datetime("us")).dt.replace_time_zone("UTC")


def _from_iso(words: pl.Expr) -> pl.Expr:
    zoned = words.str.replace(r"[Zz]$", "+00:00")
    complete = pl.when(zoned.str.contains(r"[+-]\d\d:?\d\d$")).then(zoned).otherwise(zoned + "+00:00")
    shapes = ("%Y-%m-%dT%H:%M:%S%.f%:z", "%Y-%m-%d %H:%M:%S%.f%:z", "%Y-%m-%dT%H:%M%:z", "%Y-%m-%d %H:%M%:z")
    parsed = [complete.str.to_datetime(shape, time_unit="us", strict=False) for shape in shapes]
    day = pl.when(zoned.str.len_chars() == 10).then(zoned + "T00:00:00+00:00")
    return pl.coalesce(*parsed, day.str.to_datetime(shapes[0], time_unit="us", strict=False)).cast(UTC_US)
