"""Stage 2: the offline tables of the feature store, and what of them the online store must hold.

    user_history.parquet   the user's row after every event (see pipelines.features.replay), valid from the event's time on
    latest_history.parquet the newest row of each user

Histories grow by one item a row, so the table is written in chunks and compresses to a small part of its size: a row repeats
the one before. `serve` copies the tables into the feature repository, applies it and fills the online store.
"""

import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from models.files import rename_durably
from pipelines.features import replay
from pipelines.runner.progress import Progress
from pipelines.runner.stage import content_key
from services.features.repo import USER_HISTORY_TABLE, RepoAddress, apply_repo
from services.features.rows import UserHistory
from services.features.writer import FeatureWriter, history_columns, history_from
from services.stream import aggregate
from services.stream.aggregate import history_limits

_CHUNK_ROWS = 5_000
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
    """Write every row of every user, and the newest ones, into `out`, holding one chunk in memory."""
    events = pl.read_parquet(ingested / "events.parquet")
    columns = (events["user_id"], events["item_id"], events["event_time"].dt.epoch("us"))
    rows = replay.replay(zip(*columns, strict=True), history_limits(max_items))
    latest: dict[str, UserHistory] = {}
    with pq.ParquetWriter(out / "user_history.parquet", HISTORY_SCHEMA, compression="zstd") as writer:
        for done, chunk in enumerate(_chunks(rows), 1):
            writer.write_table(_history_table(chunk))
            latest.update((row.user_id, row) for row in chunk)
            progress(min(done * _CHUNK_ROWS, events.height), events.height, "histories")
    pq.write_table(_history_table(list(latest.values())), out / "latest_history.parquet", compression="zstd")


def serve(tables: Path, address: RepoAddress, progress: Progress) -> None:
    """Put the tables into the feature repository, apply it, and materialise their newest rows. Raises DependencyAway.

    May be repeated. Rows of users whom the stream worker has taken over are left alone: they are newer, and they are its own.
    """
    apply_repo(address)
    _replace(tables / f"{USER_HISTORY_TABLE}.parquet", address.table_path(USER_HISTORY_TABLE))
    writer = FeatureWriter(address)
    histories = latest_histories(tables)
    done = 0
    for chunk in _chunks(iter(histories), 500):
        _write_unless_live(writer, chunk)
        done += len(chunk)
        progress(done, len(histories), USER_HISTORY_TABLE)


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


def _replace(source: Path, target: Path) -> None:
    scratch = target.with_suffix(".tmp")
    shutil.copyfile(source, scratch)
    rename_durably(scratch, target)
