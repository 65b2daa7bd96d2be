"""Stage 2: the offline table of users' histories, and the rows of it that the online store serves.

    user_history.parquet   the user's row after every event that changed it, valid from the event's time on
    latest_history.parquet the newest row of each user
    base_history.parquet   each user's row after the recorded events, without the live log

Events are replayed through the stream worker's own aggregate, so offline and online features are equal. Event ids,
which detect repetitions, are omitted, since arrivals contain no repetitions. Histories grow by one item a row, so the
table is written in chunks and compresses well. `serve` copies the table into the feature repository, applies the
repository, fills the online store with the base rows, and keeps them next to the live log; the stream worker rebuilds a
lost store from both.
"""

import gc
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.data import arrivals
from pipelines.data.arrivals import logged_events
from pipelines.runner.stage import Progress, content_key
from services.contracts.event_roles import DEFAULT_ROLES, EventRoles
from services.features import schema
from services.features.erasing import ErasingWriter
from services.features.repo import RepoAddress, apply_repo
from services.features.schema import BASE_TOPIC, USER_HISTORY, ColumnType, UserHistory
from services.features.writer import FeatureWriter
from services.stream import aggregate
from services.stream.aggregate import HistoryLimits, LoggedEvent, apply, history_limits
from services.stream.erasure.tables import base_id, replacing_tables, write_without
from services.stream.log.ledger import ErasureLedger
from services.stream.rebuild import base_table

_CHUNK_ROWS = 5_000
_UTC_US = pa.timestamp("us", tz="UTC")
_ARROW_TYPES = {
    ColumnType.STRING: pa.string(),
    ColumnType.INT64: pa.int64(),
    ColumnType.STRINGS: pa.list_(pa.string()),
    ColumnType.BYTES: pa.binary(),
}
HISTORY_SCHEMA = pa.schema(
    [*((column.name, _ARROW_TYPES[column.type]) for column in USER_HISTORY.columns), ("event_timestamp", _UTC_US)]
)


def key(ingested_key: str, max_items: int) -> str:
    return content_key({"max_items": max_items}, [ingested_key], [sys.modules[__name__], aggregate, arrivals, schema])


def build_tables(
    ingested: Path, max_items: int, out: Path, progress: Progress, roles: EventRoles = DEFAULT_ROLES
) -> None:
    """Write every row of every user, and the newest ones, into `out`, holding one chunk in memory."""
    events = pl.read_parquet(ingested / "arrivals.parquet")
    rows = replay(logged_events(events), replace(history_limits(max_items), max_event_ids=0), roles)
    latest: dict[str, UserHistory] = {}
    base: dict[str, UserHistory] = {}
    with (
        _no_search_for_cycles(),
        pq.ParquetWriter(out / "user_history.parquet", HISTORY_SCHEMA, compression="zstd") as writer,
    ):
        for done, chunk in enumerate(_chunks(rows), 1):
            writer.write_table(_history_table(list(_changed(chunk, latest))))
            base.update((row.user_id, row) for row in chunk if row.position.topic_id == BASE_TOPIC)
            progress(min(done * _CHUNK_ROWS, events.height), events.height, "histories")
    pq.write_table(_history_table(list(latest.values())), out / "latest_history.parquet", compression="zstd")
    pq.write_table(_history_table(list(base.values())), out / "base_history.parquet", compression="zstd")


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Disable the garbage collector inside this block: rows form no cycles, and scanning them outlasts the replay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _changed(rows: Iterable[UserHistory], latest: dict[str, UserHistory]) -> Iterator[UserHistory]:
    """Record each user's newest row, and yield rows that differ from the previous row in more than the position."""
    for row in rows:
        before = latest.get(row.user_id)
        latest[row.user_id] = row
        if before is None or before.row_time_us != row.row_time_us:
            yield row


def replay(
    events: Iterable[LoggedEvent], limits: HistoryLimits, roles: EventRoles = DEFAULT_ROLES
) -> Iterator[UserHistory]:
    """Yield the user's row after each of these events, in their order of arrival. Pure."""
    rows: dict[str, UserHistory] = {}
    for event in events:
        row = apply(rows.get(event.user_id), [event], limits, roles).row
        assert row is not None
        rows[event.user_id] = row
        yield row


def serve(tables: Path, address: RepoAddress, offline_log_dir: Path, progress: Progress) -> None:
    """Copy the tables into the repository, apply it, and write the base rows online. Raises DependencyUnavailable.

    Safe to repeat. Rows of users that the stream worker owns are newer and stay unchanged.
    """
    apply_repo(address)
    base, ledger = base_table(offline_log_dir), ErasureLedger(offline_log_dir)
    with replacing_tables(offline_log_dir):
        erased, now_ms = ledger.everybody(), time.time_ns() // 1_000_000
        write_without(tables / "user_history.parquet", address.table_path(USER_HISTORY.name), erased, now_ms)
        write_without(tables / "base_history.parquet", base, erased, now_ms)
        rows, served_id = _read_rows(base), base_id(base)
    writer = FeatureWriter(address)
    done = 0
    for chunk in _chunks(iter(rows), 500):
        writer.write_base(chunk)
        done += len(chunk)
        progress(done, len(rows), USER_HISTORY.name)
    writer.mark_base(served_id)
    writer.close()
    _remove_erased(rows, address, ledger)


def _remove_erased(rows: Sequence[UserHistory], address: RepoAddress, ledger: ErasureLedger) -> None:
    """Remove the new rows of users who were erased meanwhile: the worker may have read before the write."""
    erased = ledger.everybody()
    if erased_ids := [row.user_id for row in rows if erased.covers_time(row.user_id, row.row_time_us // 1_000)]:
        store = ErasingWriter(address)
        store.remove_base_rows(erased_ids)
        store.close()


def latest_histories(tables: Path) -> list[UserHistory]:
    """Read the newest row of each user from the stage's output."""
    return _read_rows(tables / "latest_history.parquet")


def _read_rows(table: Path) -> list[UserHistory]:
    return USER_HISTORY.from_columns(pq.read_table(table).to_pydict())


def _chunks(rows: Iterator[UserHistory], size: int = _CHUNK_ROWS) -> Iterator[list[UserHistory]]:
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def _history_table(rows: Sequence[UserHistory]) -> pa.Table:
    times = pa.array([row.row_time_us for row in rows], pa.int64()).cast(_UTC_US)
    return pa.table({**USER_HISTORY.to_columns(rows), "event_timestamp": times}, schema=HISTORY_SCHEMA)
