"""Records of the rows that the reader accepted: items of the live catalogue, and events. Pure."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from pipelines.tables.items import ATTRIBUTE
from services.contracts.events import MAX_EVENT_LEAD_MS, Interaction
from services.contracts.message import convert

TOO_OLD = "event_time is too old for the stream; --table FILE keeps such events for `tailrace pipeline --events FILE`"
IN_FUTURE = "event_time is in the future"
_FIELDS = ("title", "categories", "available", "published_ms", "expires_ms", "value")


def item_changes(items: pl.DataFrame) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each item's id and merge patch, in row order: its cells by column, null where they are empty."""
    for row in items.iter_rows(named=True):
        changes = {name: row[name] for name in _FIELDS if name in row}
        attributes = {name.removeprefix(ATTRIBUTE): row[name] for name in row if name.startswith(ATTRIBUTE)}
        yield row["item_id"], changes | ({"attributes": attributes} if attributes else {})


def interactions(events: pl.DataFrame) -> list[Interaction]:
    """Return the events, in row order. A missing event id is derived from the content, so re-imports count once."""
    return [*_interactions(events.with_columns(pl.col("event_time").dt.epoch("ms")))]


def _interactions(events: pl.DataFrame) -> Iterator[Interaction]:
    columns = events.select("user_id", "item_id", "event_time", "event_type", "value", "event_id")
    for user_id, item_id, time_ms, event_type, value, event_id in columns.iter_rows():
        fields = {
            "event_id": event_id or _content_id((user_id, item_id, time_ms, event_type, value)),
            "user_id": user_id,
            "item_id": item_id,
            "event_time_ms": time_ms,
            "event_type": event_type,
            "value": value,
        }
        yield convert(Interaction, fields)


def _content_id(content: Sequence[object]) -> str:
    return f"import-{hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()[:32]}"


def untimely(now_ms: int, oldest_ms: int | None) -> pl.Expr:
    """Return why an event cannot be imported now (in the future, or older than `oldest_ms`); null if it can."""
    time_ms = pl.col("event_time").dt.epoch("ms")
    reason = pl.when(time_ms > now_ms + MAX_EVENT_LEAD_MS).then(pl.lit(IN_FUTURE))
    return reason if oldest_ms is None else reason.when(time_ms < oldest_ms).then(pl.lit(TOO_OLD))
