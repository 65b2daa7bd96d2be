"""Joins impressions with the clicks that followed: one row per impression of an item, one Parquet file per day (UTC).

A click with a `request_id` belongs to that request's impression of the item; a click without it belongs to the newest
impression of the item to the same user. Both must fall within a window after the impression. Excluded are clicks after
the window, before the impression, on items that the impression lacks, by other users, of requests that are not in the
log, and repeated event ids (the earliest counts). Repeated impressions count once.

Impressions and clicks before a user's erasure are excluded; joining any day removes them from the other days' files
too.

One day and its window are in memory at a time. A day whose window has passed changes only if events are late: joining
it again replaces its file. Columns that old impressions lack are null. User ids are the product's own.

| column | content |
|---|---|
| request_id, user_id, session, shown_time_ms | the impression; null: user_id of a visitor, session that was not sent |
| surface, name, bundle_version, variant, tier, reason, elapsed_ms, deadline_ms | as recorded |
| position, item_id, score, propensity | the item, its position from 1 on, its score, its probability at this position |
| clicks, value, clicked_time_ms | number of clicks (0: none), the sum of their values, the time of the first (null) |

`session` is a hash of the visitor's session.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

import polars as pl

from models.files import each_file
from services.errors import DataError

ErasedUntil = Callable[[str], int | None]
DAY_MS = 86_400_000
WINDOW_MS = 30 * 60_000
SKEW_MS = 60_000
"""Maximum lag of a caller's clock: a click that names its request may appear to precede the impression by this much."""
_OF_IMPRESSION = {
    "request_id": pl.String,
    "user_id": pl.String,
    "shown_time_ms": pl.Int64,
    "surface": pl.String,
    "name": pl.String,
    "bundle_version": pl.String,
    "variant": pl.String,
    "tier": pl.String,
    "reason": pl.String,
    "elapsed_ms": pl.Float64,
    "deadline_ms": pl.Int64,
    "session": pl.String,
}
_OF_ITEMS = {
    "position": ("positions", pl.Int64),
    "item_id": ("item_ids", pl.String),
    "score": ("scores", pl.Float64),
    "propensity": ("propensity", pl.Float64),
}
_OF_CLICK = {
    "event_id": pl.String,
    "user_id": pl.String,
    "item_id": pl.String,
    "event_type": pl.String,
    "event_time_ms": pl.Int64,
    "value": pl.Float64,
    "request_id": pl.String,
}
IMPRESSION = ["request_id", "user_id", "shown_time_ms"]
"""Key of an impression: callers may send the same request ID twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One day: its file, its impressions, and the clicks within its hours and window that joined it."""

    path: Path
    num_impressions: int
    num_clicks: int


def join(
    impressions: Path,
    events: Path,
    out: Path,
    *,
    window_ms: int = WINDOW_MS,
    event_types: Sequence[str] = ("click",),
    since: date | None = None,
    until: date | None = None,
    erased_until: ErasedUntil = lambda _user_id: None,
) -> Iterator[Joined]:
    """Join day by day and write `out/YYYY-MM-DD.parquet`; yield each day once its file is complete.

    Args:
        impressions: Folder (or file) of impressions as Parquet, in any subfolders.
        events: The same of interactions.
        out: Folder of the result, created if missing.
        window_ms: How long after an impression a click still belongs to it.
        event_types: The types that count as clicks.
        since: The first day; None: the log's first.
        until: The day after the last; None: the log's last.
        erased_until: Returns until when (Unix ms) a user was erased; None if the user was not erased.

    Raises:
        DataError: A folder has no Parquet file, or a file that cannot be read or lacks a required column.
    """
    shown, clicks = _scan(impressions, ("request_id", "user_id", "shown_time_ms", "item_ids")), _scan(events, _REQUIRED)
    span = shown.select(first=pl.col("shown_time_ms").min(), last=pl.col("shown_time_ms").max()).collect().row(0)
    if span[0] is None:
        raise DataError("", f"{impressions} has no impressions", "impressions of answered requests")
    first = span[0] // DAY_MS if since is None else _day_of(since)
    last = span[1] // DAY_MS + 1 if until is None else _day_of(until)
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("*.parquet"):  # the log may no longer contain this day
        before = pl.read_parquet(path)
        if len(kept := _kept(before, "shown_time_ms", erased_until)) < len(before):
            _write(kept, path)
    for day in range(max(first, span[0] // DAY_MS), min(last, span[1] // DAY_MS + 1)):
        start, end = day * DAY_MS, (day + 1) * DAY_MS
        items = _kept(_items(_within(shown, "shown_time_ms", start, end + window_ms)), "shown_time_ms", erased_until)
        near = _within(clicks, "event_time_ms", start - max(window_ms, SKEW_MS), end + window_ms)
        events_near = _kept(_clicks(near, event_types), "event_time_ms", erased_until)
        table = _joined(items, events_near, window_ms, end)
        path = out / f"{datetime.fromtimestamp(start / 1_000, UTC):%Y-%m-%d}.parquet"
        _write(table, path)
        yield Joined(
            path=path, num_impressions=table.select(IMPRESSION).n_unique(), num_clicks=int(table["clicks"].sum())
        )


def unit() -> pl.Expr:
    """Return the experimental unit of a table row: the user, else the visitor's session, else the request."""
    return pl.coalesce("user_id", pl.lit("session ") + pl.col("session"), pl.lit("visitor ") + pl.col("request_id"))


_REQUIRED = ("event_id", "user_id", "item_id", "event_time_ms")


def _day_of(day: date) -> int:
    return (day - date(1970, 1, 1)).days


def _scan(source: Path, required: Iterable[str]) -> pl.LazyFrame:
    files = [path for path in each_file(source) if path.suffix == ".parquet"] if source.is_dir() else [source]
    frames = []
    for file in files:
        try:
            pl.read_parquet_schema(file)
        except FileNotFoundError:  # removed by the worker since it was listed
            continue
        except (pl.exceptions.PolarsError, OSError) as error:
            raise DataError("", f"{file} cannot be read; replace or remove it", "a Parquet file of the log") from error
        frames.append(pl.scan_parquet(file, hive_partitioning=False))
    if not frames:
        raise DataError("", f"{source} has no Parquet file", "the worker's log folder")
    table = pl.concat(frames, how="diagonal_relaxed") if len(frames) > 1 else frames[0]
    for name in required:
        if name not in table.collect_schema():
            raise DataError(name, f"{source} lacks it", "the columns of the log")
    return table


def _within(table: pl.LazyFrame, column: str, start: int, end: int) -> pl.LazyFrame:
    return table.filter(pl.col(column).is_between(start, end, closed="left"))


def _items(shown: pl.LazyFrame) -> pl.DataFrame:
    """Return a row for each item of each impression, without its clicks."""
    there = shown.collect_schema().names()
    length = pl.col("item_id").list.len()
    instead = {"position": pl.int_ranges(1, length + 1)} | {
        name: pl.lit(None, kind).repeat_by(length) for name, (_, kind) in _OF_ITEMS.items() if name != "position"
    }
    table = (
        shown.select(
            *(_column(there, name, name, kind) for name, kind in _OF_IMPRESSION.items()),
            *(_column(there, source, name, pl.List(kind)) for name, (source, kind) in _OF_ITEMS.items()),
        )
        .filter(length > 0)
        .unique(IMPRESSION, keep="first", maintain_order=True)
        .with_columns(
            pl.when(pl.col(name).list.len() == length)
            .then(pl.col(name))
            .otherwise(other.cast(pl.List(_OF_ITEMS[name][1])))
            for name, other in instead.items()
        )
        .collect()
    )
    return exploded(table, list(_OF_ITEMS))


def exploded(lists: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Return a row for each item of each list, each item of a list once.

    `columns`, `item_id` among them, are by item.
    """
    return lists.explode(list(columns)).unique([*IMPRESSION, "item_id"], keep="first", maintain_order=True)


def _kept(table: pl.DataFrame, time: str, erased_until: ErasedUntil) -> pl.DataFrame:
    """Return the rows of users who were not erased since."""
    users = table["user_id"].unique().drop_nulls()
    until = {user_id: until_ms for user_id in users if (until_ms := erased_until(user_id)) is not None}
    if not until:
        return table
    last = pl.col("user_id").replace_strict(until, default=None, return_dtype=pl.Int64)
    return table.filter((pl.col(time) > last).fill_null(last.is_null()))


def _column(there: Sequence[str], source: str, name: str, kind: pl.DataType | type[pl.DataType]) -> pl.Expr:
    """Return a column under its name in the result; null if the log lacks it."""
    return (pl.col(source) if source in there else pl.lit(None)).cast(kind).alias(name)


def _clicks(events: pl.LazyFrame, event_types: Sequence[str]) -> pl.DataFrame:
    """Return the events that count, each ID once: the earliest."""
    there = events.collect_schema().names()
    table = events.select(_column(there, name, name, kind) for name, kind in _OF_CLICK.items()).filter(
        pl.col("event_type").fill_null("click").is_in(list(event_types))
    )
    return earliest(table.collect())


def earliest(clicks: pl.DataFrame) -> pl.DataFrame:
    """Return each event ID once: its earliest event."""
    return clicks.sort("event_time_ms", "event_id").unique("event_id", keep="first", maintain_order=True)


def followed(items: pl.DataFrame, clicks: pl.DataFrame, window_ms: int) -> pl.DataFrame:
    """Return the clicks of each impression of an item. Every click-based evaluation joins by this rule.

    Args:
        items: A row for each item of each impression: the columns of `IMPRESSION`, and `item_id`.
        clicks: A row for each event ID: `user_id, item_id, event_time_ms, value, request_id`. IDs have the same type in
            both tables.
        window_ms: How long after an impression a click still belongs to it.

    Returns:
        The columns of `IMPRESSION`, `item_id`, and `clicks, value, clicked_time_ms`, for items with a click.
    """
    shown = items.select(
        *IMPRESSION, "item_id", at=pl.col("shown_time_ms"), shown_user="user_id", shown_request="request_id"
    ).sort("at", "shown_request")
    named = clicks.filter(pl.col("request_id").is_not_null())
    unnamed = clicks.filter(pl.col("request_id").is_null())
    by_request = (
        named.with_columns(at=pl.col("event_time_ms") + SKEW_MS)
        .sort("at")
        .join_asof(shown.drop("user_id"), on="at", by=["request_id", "item_id"], check_sortedness=False)
        .filter(pl.col("shown_user").is_null() | (pl.col("shown_user") == pl.col("user_id")))
    )
    by_user = (
        unnamed.drop("request_id")
        .with_columns(at=pl.col("event_time_ms"))
        .sort("at")
        .join_asof(
            shown.filter(pl.col("user_id").is_not_null()), on="at", by=["user_id", "item_id"], check_sortedness=False
        )
    )
    return (
        pl.concat([table.select(_FOUND) for table in (by_request, by_user)])
        .filter(pl.col("event_time_ms") - pl.col("shown_time_ms") <= window_ms)
        .group_by(*IMPRESSION, "item_id")
        .agg(
            clicks=pl.len().cast(pl.Int64),
            value=pl.col("value").sum(),
            clicked_time_ms=pl.col("event_time_ms").min(),
        )
    )


def _joined(items: pl.DataFrame, clicks: pl.DataFrame, window_ms: int, end: int) -> pl.DataFrame:
    """Return the items shown before `end` with their clicks.

    Later impressions take part because clicks may belong to them.
    """
    return (
        items.filter(pl.col("shown_time_ms") < end)
        .join(
            followed(items, clicks, window_ms),
            on=[*IMPRESSION, "item_id"],
            how="left",
            nulls_equal=True,
            maintain_order="left",
        )
        .with_columns(pl.col("clicks").fill_null(0), pl.col("value").fill_null(0.0))
        .sort("shown_time_ms", "request_id", "position", maintain_order=True)
    )


_FOUND = [
    pl.col("shown_request").alias("request_id"),
    pl.col("shown_user").alias("user_id"),
    "shown_time_ms",
    "item_id",
    "event_time_ms",
    pl.col("value").fill_null(1.0),
]


def _write(table: pl.DataFrame, path: Path) -> None:
    """Write a file atomically."""
    scratch = path.with_suffix(f".{os.getpid()}.part")
    table.write_parquet(scratch)
    scratch.replace(path)
