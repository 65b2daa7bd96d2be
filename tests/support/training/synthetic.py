"""A synthetic data set: users walk along a ring of items, so few events suffice to learn the next item."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipelines.codes.options import CodesOptions
from pipelines.codes.tokenize import ReadHistories, tokenize
from pipelines.data.arrivals import arrange
from pipelines.data.roles import dislikes_of, joins_history, with_labels
from pipelines.tables.events import order_events
from pipelines.tables.files import Frame
from pipelines.tables.reader import EventTable, ItemTable
from services.contracts.event_roles import DEFAULT_ROLES, EventRoles, parse_event_roles

STEP_S = 60
BEGIN_S = 1_700_000_000


def raw_items(num_items: int) -> pl.DataFrame:
    """Items i00, i01, ... in two categories."""
    names = [f"i{index:02d}" for index in range(num_items)]
    kinds = [["even", "odd"][index % 2] for index in range(num_items)]
    return pl.DataFrame({"item_id": names, "title": [f"Item {name}" for name in names], "categories": kinds})


def raw_events(num_users: int, num_items: int, events_per_user: int, seed: int = 0) -> pl.DataFrame:
    """Each user starts at a random item and mostly steps to the next item of the ring, sometimes skipping one."""
    rng = np.random.default_rng(seed)
    rows = []
    for user in range(num_users):
        item = int(rng.integers(num_items))
        for step in range(events_per_user):
            rows.append((f"u{user:03d}", f"i{item:02d}", BEGIN_S + user + step * STEP_S))
            item = (item + (2 if rng.random() < 0.1 else 1)) % num_items
    return pl.DataFrame(rows, schema=["user_id", "item_id", "event_time"], orient="row")


def read_events(raw: pl.DataFrame, known: pl.Series) -> pl.DataFrame:
    return EventTable(Frame(raw, "events")).read(known).drop("row", "event_id")


def write_events(events: pl.DataFrame, folder: Path, roles: EventRoles = DEFAULT_ROLES) -> None:
    """Write events in order of time as the ingest stage does: histories, and dislikes."""
    with_labels(events, roles).filter(joins_history()).write_parquet(folder / "events.parquet")
    dislikes_of(events, roles).write_parquet(folder / "dislikes.parquet")


def write_ingested(folder: Path, num_users: int = 40, num_items: int = 30, events_per_user: int = 12) -> Path:
    """Write the output of the ingest stage."""
    folder.mkdir(parents=True, exist_ok=True)
    items = ItemTable(Frame(raw_items(num_items), "items")).read_catalogue()
    events = read_events(raw_events(num_users, num_items, events_per_user), items["item_id"])
    write_events(order_events(events), folder)
    items.write_parquet(folder / "items.parquet")
    return folder


def write_with_dislikes(folder: Path) -> Path:
    """Write the same for users who also buy, which weighs more than a click, or dislike items midway or at the end."""
    write_ingested(folder)
    rng, kinds = np.random.default_rng(1), ["click", "click", "buy", "dislike"]
    events = raw_events(40, 30, 16).with_columns(event_type=pl.Series(rng.choice(kinds, 40 * 16)))
    roles = parse_event_roles("[types.buy]\nweight = 3")
    known = pl.read_parquet(folder / "items.parquet")["item_id"]
    write_events(order_events(read_events(events, known)), folder, roles)
    return folder


def ratings(*pairs: tuple[str, str]) -> pl.DataFrame:
    """Build recorded events of (user, item), one microsecond apart."""
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=number) for number in range(len(pairs))]
    rows = [(user, item, at, "rating", 1.0) for (user, item), at in zip(pairs, times, strict=True)]
    columns = ["user_id", "item_id", "event_time", "event_type", "value"]
    return pl.DataFrame(rows, columns, orient="row", schema_overrides={"event_time": pl.Datetime("us", "UTC")})


def write_arrivals(events: pl.DataFrame, folder: Path) -> None:
    """Write recorded events with rising times per user as the ingest stage does."""
    columns = {"event_id": pl.String, "topic_id": pl.String, "partition": pl.Int32, "offset": pl.Int64}
    none = events.clear().with_columns(pl.lit(None, kind).alias(name) for name, kind in columns.items())
    arrange(events, none).write_parquet(folder / "arrivals.parquet")


def tokenized(ingested: Path, out: Path, codes: CodesOptions | None = None, **options: Any) -> Path:
    """Write the output of the stage `tokenize`, with histories by the oracle's join, and return its folder."""
    out.mkdir(parents=True, exist_ok=True)
    tokenize(ingested, histories_from(ingested), 1_000, out, codes, **options)
    return out


def histories_from(ingested: Path) -> ReadHistories:
    """Return a point-in-time join in plain loops: the oracle for the feature store's join."""
    events = pl.read_parquet(ingested / "events.parquet")

    def read(rows: pl.DataFrame) -> pl.DataFrame:
        histories = [
            events.filter((pl.col("user_id") == user) & (pl.col("event_time") <= when))["item_id"].to_list()
            for user, when in rows.iter_rows()
        ]
        return rows.with_columns(history_item_ids=pl.Series(histories, dtype=pl.List(pl.String)))

    return read
