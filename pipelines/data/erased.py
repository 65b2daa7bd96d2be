"""Events of erased users are left out of what is ingested: given tables are read without them, and need not be rebuilt."""

from collections.abc import Iterable

import polars as pl

from pipelines.data import schema
from services.features.schema import LogPosition
from services.stream.erasure.ledger import Erased, Ledger, Tombstone

_USER = "user_id"


def without_erased(raw: pl.DataFrame, ledger: Ledger | None) -> pl.DataFrame:
    """Return a given table's raw events without those at or before their user's erasure; of an erased user, those without a readable time too."""
    erased = _whoever(ledger)
    if not erased:
        return raw
    read = schema.users_and_times(raw)
    found = _found(read, erased)
    until = pl.DataFrame(
        {_USER: list(found), "_until_ms": [one.accepted_time_ms for one in found.values()]},
        schema={_USER: pl.String, "_until_ms": pl.Int64},
    )
    joined = read.join(until, on=_USER, how="left", maintain_order="left")
    is_after = (pl.col("event_time").dt.epoch("ms") > pl.col("_until_ms")).fill_null(value=False)
    return raw.filter(joined.select(pl.col("_until_ms").is_null() | is_after).to_series())


def logged_without_erased(events: pl.DataFrame, ledger: Ledger | None) -> pl.DataFrame:
    """Return the live log's events without those that came before their user's erasure, by their place in the log."""
    found = _found(events, _whoever(ledger))
    if not found:
        return events
    theirs = events.with_row_index("_row").filter(pl.col(_USER).is_in(list(found)))
    places: Iterable[tuple[int, str, str, int, int]] = theirs.select(
        "_row", _USER, "topic_id", "partition", "offset"
    ).iter_rows()
    gone = [
        row
        for row, user_id, topic_id, partition, offset in places
        if found[user_id].covers(LogPosition(topic_id, partition, offset))
    ]
    return events.with_row_index("_row").filter(~pl.col("_row").is_in(gone)).drop("_row")


def _whoever(ledger: Ledger | None) -> Erased | None:
    return ledger.everybody() if ledger is not None else None


def _found(events: pl.DataFrame, erased: Erased | None) -> dict[str, Tombstone]:
    """Return the erased users among those of a table."""
    if not erased:
        return {}
    users = (str(user_id) for user_id in events[_USER].unique().drop_nulls().to_list())
    return {user_id: tombstone for user_id in users if (tombstone := erased.of(user_id)) is not None}
