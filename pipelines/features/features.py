"""Stage 2: the offline tables of the feature store, and what of them the online store must hold.

    user_history.parquet   the user's row after every event (see pipelines.features.replay), valid from the event's time on
    latest_history.parquet the newest row of each user
    user_profile.parquet   mean value, most frequent categories, first event; as of the user's newest event
    item_stats.parquet     counts and mean value; as of the newest event of all

Histories grow by one item a row, so the table is written in chunks and compresses to a small part of its size: a row repeats
the one before. `serve` copies the tables into the feature repository, applies it and fills the online store.
"""

import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from models.files import rename_durably
from pipelines.features import replay
from pipelines.runner.progress import Progress
from pipelines.runner.stage import content_key
from services.features.repo import RepoAddress, apply_repo
from services.features.rows import UserHistory
from services.features.writer import FeatureWriter, history_columns, history_from
from services.stream import aggregate
from services.stream.aggregate import history_limits

TABLES = ("user_history", "user_profile", "item_stats")
_CHUNK_ROWS = 5_000
_TOP_CATEGORIES = 5
_UTC_US = pa.timestamp("us", tz="UTC")
HISTORY_SCHEMA = pa.schema(
    [
        ("user_id", pa.string()),
        ("item_ids", pa.list_(pa.string())),
        ("newest_event_time_ms", pa.int64()),
        ("num_events", pa.int64()),
        ("row_time_us", pa.int64()),
        ("recent_event_ids", pa.list_(pa.string())),
        ("topic_id", pa.string()),
        ("partition", pa.int64()),
        ("offset", pa.int64()),
        ("event_timestamp", _UTC_US),
    ]
)


def key(ingested_key: str, max_items: int) -> str:
    """Return the content key of the tables."""
    return content_key({"max_items": max_items}, [ingested_key], [sys.modules[__name__], aggregate])


def build_tables(ingested: Path, max_items: int, out: Path, progress: Progress) -> None:
    """Write all tables into `out`."""
    events, items = pl.read_parquet(ingested / "events.parquet"), pl.read_parquet(ingested / "items.parquet")
    write_histories(events, max_items, out, progress)
    user_profile(events, items).write_parquet(out / "user_profile.parquet")
    item_stats(events).write_parquet(out / "item_stats.parquet")


def write_histories(events: pl.DataFrame, max_items: int, out: Path, progress: Progress) -> None:
    """Write every row of every user, and the newest ones, holding one chunk in memory."""
    columns = (events["user_id"], events["item_id"], events["event_time"].dt.epoch("us"))
    rows = replay.replay(zip(*columns, strict=True), history_limits(max_items))
    latest: dict[str, UserHistory] = {}
    with pq.ParquetWriter(out / "user_history.parquet", HISTORY_SCHEMA, compression="zstd") as writer:
        for done, chunk in enumerate(_chunks(rows), 1):
            writer.write_table(_history_table(chunk))
            latest.update((row.user_id, row) for row in chunk)
            progress(min(done * _CHUNK_ROWS, events.height), events.height, "histories")
    pq.write_table(_history_table(list(latest.values())), out / "latest_history.parquet", compression="zstd")


def user_profile(events: pl.DataFrame, items: pl.DataFrame) -> pl.DataFrame:
    """Sum each user up as of the user's newest event; categories by frequency, ties by name."""
    categories = (
        events.join(items.select("item_id", "categories"), on="item_id")
        .explode("categories")
        .drop_nulls("categories")
        .group_by("user_id", "categories")
        .len()
        .sort("len", "categories", descending=[True, False])
        .group_by("user_id", maintain_order=True)
        .agg(top_categories=pl.col("categories").head(_TOP_CATEGORIES))
    )
    return (
        events.group_by("user_id")
        .agg(
            mean_value=pl.col("value").mean(),
            first_event_time_ms=pl.col("event_time").min().dt.epoch("ms"),
            event_timestamp=pl.col("event_time").max(),
        )
        .join(categories, on="user_id", how="left")
        .with_columns(pl.col("top_categories").fill_null([]))
        .sort("user_id")
    )


def item_stats(events: pl.DataFrame) -> pl.DataFrame:
    """Sum each item up as of the newest event of all."""
    stats = events.group_by("item_id").agg(
        num_events=pl.len().cast(pl.Int64),
        num_users=pl.col("user_id").n_unique().cast(pl.Int64),
        mean_value=pl.col("value").mean(),
    )
    return stats.with_columns(event_timestamp=pl.lit(events["event_time"].max())).sort("item_id")


def serve(tables: Path, address: RepoAddress, progress: Progress) -> None:
    """Put the tables into the feature repository, apply it, and materialise their newest rows. Raises DependencyAway.

    May be repeated. Rows of users whom the stream worker has taken over are left alone: they are newer, and they are its own.
    """
    apply_repo(address)
    for view in TABLES:
        _replace(tables / f"{view}.parquet", address.table_path(view))
    writer = FeatureWriter(address)
    histories = latest_histories(tables)
    batch_views = {view: pl.read_parquet(tables / f"{view}.parquet") for view in TABLES[1:]}
    total = len(histories) + sum(frame.height for frame in batch_views.values())
    done = 0
    for chunk in _chunks(iter(histories), 500):
        _write_unless_live(writer, chunk)
        done += len(chunk)
        progress(done, total, "user_history")
    for view, frame in batch_views.items():
        for part in frame.iter_slices(1_000):
            writer.write_view(view, _online_columns(part))
            done += part.height
            progress(done, total, view)


def latest_histories(tables: Path) -> list[UserHistory]:
    """Read the newest row of each user from the stage's output."""
    return [history_from(row) for row in pq.read_table(tables / "latest_history.parquet").to_pylist()]


def _write_unless_live(writer: FeatureWriter, rows: Sequence[UserHistory]) -> None:
    online = writer.read_histories([row.user_id for row in rows])
    live = {user_id for user_id, row in online.items() if row.position.topic_id != replay.BATCH_TOPIC}
    writer.write_histories([row for row in rows if row.user_id not in live])


def _chunks(rows: Iterator[UserHistory], size: int = _CHUNK_ROWS) -> Iterator[list[UserHistory]]:
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def _history_table(rows: Sequence[UserHistory]) -> pa.Table:
    columns = history_columns(rows)
    columns["event_timestamp"] = pa.array(columns["event_timestamp"], pa.int64()).cast(_UTC_US)
    return pa.table(columns, schema=HISTORY_SCHEMA)


def _online_columns(frame: pl.DataFrame) -> dict[str, list[Any]]:
    return frame.with_columns(pl.col("event_timestamp").dt.epoch("us")).to_dict(as_series=False)


def _replace(source: Path, target: Path) -> None:
    scratch = target.with_suffix(".tmp")
    shutil.copyfile(source, scratch)
    rename_durably(scratch, target)
