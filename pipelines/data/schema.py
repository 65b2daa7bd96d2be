"""What a raw table must be: which columns, and which rows cannot be used and why. Pure; polars frames in and out.

A missing column, or one in which not one row can be read, is a mistake of the table and stops the pipeline. Single bad
rows are set aside with a reason instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

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
_OPTIONAL_EXAMPLES = {"event_type": "'click'", "value": "1.0", "categories": "'Drama|War'", "text": "'A toy cowboy.'"}


@dataclass(frozen=True, slots=True)
class Checked:
    """The rows that can be used, in their order, and those set aside as text columns with a `reason`."""

    good: pl.DataFrame
    rejected: pl.DataFrame


def check_items(raw: pl.DataFrame, table: str = "items") -> Checked:
    """Return items as (item_id, title, categories list, text); a repeated item keeps its first good row.

    Raises DataError, which names `table`.
    """
    _require(raw, _ITEM_EXAMPLES, table)
    title = _text(raw, "title")
    typed = raw.select(
        item_id=_text(raw, "item_id"), title=title, categories=_categories(raw), text=_text(raw, "text", default=title)
    )
    reason = (
        pl.when(_bad_id("item_id"))
        .then(pl.lit("item_id"))
        .when(pl.col("title").is_null())
        .then(pl.lit("title"))
        .when(~pl.struct("item_id", pl.col("title").is_null()).is_first_distinct())
        .then(pl.lit("item_id repeated"))
    )
    return _split(raw, typed, reason, _ITEM_EXAMPLES, table)


def check_events(raw: pl.DataFrame, known_items: pl.Series, table: str = "events", kept: Sequence[str] = ()) -> Checked:
    """Return events as (user_id, item_id, event_time, event_type, value) in file order, and with them the columns `kept`.

    Raises DataError, which names `table`.
    """
    _require(raw, _EVENT_EXAMPLES, table)
    typed = raw.select(
        user_id=_text(raw, "user_id"),
        item_id=_text(raw, "item_id"),
        event_time=_time(raw),
        event_type=_text(raw, "event_type", default=pl.lit("interaction")).fill_null("interaction"),
        value=_value(raw),
        **{name: pl.col(name) for name in kept},
    )
    reason = (
        pl.when(_bad_id("user_id"))
        .then(pl.lit("user_id"))
        .when(_bad_id("item_id"))
        .then(pl.lit("item_id"))
        .when(pl.col("event_time").is_null())
        .then(pl.lit("event_time"))
        .when(pl.col("value").is_null() | ~pl.col("value").is_finite())
        .then(pl.lit("value"))
        .when(~pl.col("item_id").is_in(known_items.implode()))
        .then(pl.lit("item_id not in items"))
    )
    return _split(raw, typed, reason, _EVENT_EXAMPLES, table)


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


def _split(raw: pl.DataFrame, typed: pl.DataFrame, reason: pl.Expr, examples: dict[str, str], table: str) -> Checked:
    reasons = typed.select(reason=reason)["reason"]
    counts = reasons.drop_nulls().value_counts()
    for column, count in counts.iter_rows():
        if count == raw.height and column in examples:
            raise DataError(column, f"not one row can be used, such as {raw[column][0]!r} in {table}", examples[column])
    as_text = raw.filter(reasons.is_not_null()).select(pl.all().map_batches(_shown, return_dtype=pl.String))
    return Checked(typed.filter(reasons.is_null()), as_text.with_columns(reason=reasons.drop_nulls()))


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


def _value(raw: pl.DataFrame) -> pl.Expr:
    if "value" not in raw.columns:
        return pl.lit(1.0)
    missing = pl.col("value").is_null()
    return pl.when(missing).then(1.0).otherwise(pl.col("value").cast(pl.Float64, strict=False))


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
