"""Excludes events of erased users from ingestion; input tables need not be rebuilt."""

from collections.abc import Callable, Iterable
from functools import partial

import polars as pl

from services.contracts.tenant import DEFAULT_TENANT, prefix_of
from services.features.schema import LogPosition
from services.stream.log.ledger import Erased, ErasureLedger, Tombstone

_USER = "user_id"


def keeps_unerased(
    ledger: ErasureLedger | None, tenant: str = DEFAULT_TENANT
) -> Callable[[pl.DataFrame], pl.Series] | None:
    """Return a predicate over rows with user_id and event_time that keeps unerased rows; None without erasures.

    The rows have the ids that the tenant's callers know. It keeps rows of other users and rows after their user's
    erasure. A row of an erased user without a readable time is dropped.
    """
    erased = _whoever(ledger)
    return partial(_is_kept, erased, tenant) if erased else None


def _is_kept(erased: Erased, tenant: str, rows: pl.DataFrame) -> pl.Series:
    rows = rows.with_columns(pl.lit(prefix_of(tenant)) + pl.col(_USER))
    erasures = _found(rows, erased)
    until = pl.DataFrame(
        {_USER: list(erasures), "_until_ms": [erasure.accepted_time_ms for erasure in erasures.values()]},
        schema={_USER: pl.String, "_until_ms": pl.Int64},
    )
    joined = rows.select(_USER, "event_time").join(until, on=_USER, how="left", maintain_order="left")
    is_after = (pl.col("event_time").dt.epoch("ms") > pl.col("_until_ms")).fill_null(value=False)
    return joined.select(pl.col("_until_ms").is_null() | is_after).to_series()


def logged_without_erased(events: pl.DataFrame, ledger: ErasureLedger | None) -> pl.DataFrame:
    """Return the live log's events that are not covered by an erasure, judged by their position in the log."""
    erasures = _found(events, _whoever(ledger))
    if not erasures:
        return events
    theirs = events.with_row_index("_row").filter(pl.col(_USER).is_in(list(erasures)))
    places: Iterable[tuple[int, str, str, int, int]] = theirs.select(
        "_row", _USER, "topic_id", "partition", "offset"
    ).iter_rows()
    erased_rows = [
        row
        for row, user_id, topic_id, partition, offset in places
        if erasures[user_id].covers(LogPosition(topic_id, partition, offset))
    ]
    return events.with_row_index("_row").filter(~pl.col("_row").is_in(erased_rows)).drop("_row")


def _whoever(ledger: ErasureLedger | None) -> Erased | None:
    return ledger.everybody() if ledger is not None else None


def _found(events: pl.DataFrame, erased: Erased | None) -> dict[str, Tombstone]:
    if not erased:
        return {}
    users = (str(user_id) for user_id in events[_USER].unique().drop_nulls().to_list())
    return {user_id: tombstone for user_id in users if (tombstone := erased.of(user_id)) is not None}
