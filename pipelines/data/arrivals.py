"""All events in the order of histories: recorded events by time, then live-log events by arrival.

The stream worker's own aggregate decides which logged events are duplicates and which time a user's row has after each
event. A history read as of a row's time is therefore the history that was served then, including late events,
duplicates and events of items outside the catalogue.
"""

from collections.abc import Iterator

import polars as pl

from services.contracts.event_roles import DEFAULT_ROLES, EventRoles
from services.features.schema import BASE_TOPIC, LogPosition, UserHistory
from services.stream.aggregate import HistoryLimits, LoggedEvent, apply

_ANY_LENGTH = HistoryLimits(max_items=1)
"""Neither duplicates nor times depend on how many items a row keeps."""


def arrange(recorded: pl.DataFrame, logged: pl.DataFrame, roles: EventRoles = DEFAULT_ROLES) -> pl.DataFrame:
    """Return both as one table in order of arrival, without the events that the aggregate skips, plus `row_time`.

    Args:
        recorded: Ordered events with rising times per user, without ignored events.
        logged: Events in order of arrival with event_id, topic_id, partition and offset.
        roles: Roles of the event types.
    """
    numbered = recorded.with_columns(
        event_id=pl.format(f"{BASE_TOPIC}-{{}}", pl.int_range(pl.len())),
        topic_id=pl.lit(BASE_TOPIC),
        partition=pl.lit(0, pl.Int32),
        offset=pl.int_range(pl.len(), dtype=pl.Int64),
        row_time=pl.col("event_time"),
    )
    newest = recorded.group_by("user_id").agg(pl.col("event_time").max().dt.epoch("us"))
    applied = list(_applied(logged, dict(newest.iter_rows()), roles))
    times = pl.from_epoch(pl.Series([time_us for _, time_us in applied], dtype=pl.Int64), "us")
    kept = logged[[index for index, _ in applied]].with_columns(row_time=times.dt.replace_time_zone("UTC"))
    return pl.concat([numbered, kept.select(numbered.columns)])


def not_logged(recorded: pl.DataFrame, logged: pl.DataFrame) -> pl.DataFrame:
    """Return the recorded events that the live log does not contain; logged events count where they arrived.

    Equal events have the same user, item, type and time in milliseconds, or the same user, item and `event_id` if
    `recorded` has that column.
    """
    same = [pl.col("user_id"), pl.col("item_id"), pl.col("event_type"), pl.col("event_time").dt.epoch("ms")]
    others = recorded.join(logged, on=same, how="anti", maintain_order="left")
    if "event_id" in recorded.columns:
        others = others.join(logged, on=["user_id", "item_id", "event_id"], how="anti", maintain_order="left")
    return others


def logged_events(arrivals: pl.DataFrame) -> Iterator[LoggedEvent]:
    """Yield the rows as the events that the aggregate takes."""
    columns = [arrivals[name] for name in ("user_id", "item_id", "event_id")]
    positions = [arrivals[name] for name in ("topic_id", "partition", "offset")]
    times_us, meanings = arrivals["event_time"].dt.epoch("us"), (arrivals["event_type"], arrivals["value"])
    for user_id, item_id, event_id, time_us, event_type, value, *position in zip(
        *columns, times_us, *meanings, *positions, strict=True
    ):
        yield LoggedEvent(user_id, item_id, event_id, time_us, LogPosition(*position), event_type, value)


def _applied(logged: pl.DataFrame, recorded_us: dict[str, int], roles: EventRoles) -> Iterator[tuple[int, int]]:
    """Yield the index of each logged event that is applied, and the row's time (Unix µs) after it."""
    rows: dict[str, UserHistory] = {}
    for index, event in enumerate(logged_events(logged)):
        before = rows.get(event.user_id) or _recorded_row(event.user_id, recorded_us.get(event.user_id))
        outcome = apply(before, [event], _ANY_LENGTH, roles)
        if outcome.num_applied and outcome.row is not None:
            rows[event.user_id] = outcome.row
            yield index, outcome.row.row_time_us


def _recorded_row(user_id: str, time_us: int | None) -> UserHistory | None:
    """Return the parts of a user's row that later events depend on; None if the user has no recorded events."""
    if time_us is None:
        return None
    return UserHistory(
        user_id=user_id,
        item_ids=(),
        newest_event_time_ms=time_us // 1_000,
        num_events=0,
        row_time_us=time_us,
        position=LogPosition(BASE_TOPIC, 0, 0),
    )
