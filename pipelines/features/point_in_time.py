"""Point-in-time features: Feast's join, and the histories of the rows that it selects.

Feast's join pairs each requested row with all earlier rows of its user before it keeps the newest; including the lists
of item ids, that takes gigabytes. So Feast joins small columns only, which selects the row by its time, and the list of
that row is fetched afterwards by its exact key.

The join runs in a separate process: its memory is returned before training begins, and a process with both duckdb and
torch ends with pages of warnings about leaked types.
"""

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor

import polars as pl

from services.features.repo import RepoAddress, open_store
from services.features.schema import USER_HISTORY

_SMALL = [f"{USER_HISTORY.name}:{column}" for column in ("num_events", "newest_event_time_ms", "row_time_us")]


def histories_as_of(address: RepoAddress, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows (user_id, event_timestamp in UTC) with `history_item_ids`, `num_events` and `newest_event_time_ms`.

    A history holds exactly the events at or before the timestamp: pass the microsecond before an event that must not be
    seen. Rows keep their order; a user without events by then has an empty list, `num_events` 0 and no
    `newest_event_time_ms`. `tables.serve` must have been run.
    """
    requested = rows.select("user_id", pl.col("event_timestamp").dt.cast_time_unit("us"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        joined = child.submit(_join, address, requested).result()
    history = pl.scan_parquet(address.table_path(USER_HISTORY.name)).select(
        "user_id", "row_time_us", history_item_ids="item_ids"
    )
    keys = joined.select("user_id", "row_time_us").drop_nulls().unique()
    lists = keys.lazy().join(history, on=["user_id", "row_time_us"], how="inner").collect(engine="streaming")
    histories = joined.join(lists, on=["user_id", "row_time_us"], how="left").drop("row_time_us")
    answer = requested.join(histories, on=["user_id", "event_timestamp"], how="left", maintain_order="left")
    return answer.with_columns(pl.col("num_events").fill_null(0), pl.col("history_item_ids").fill_null([]))


def _join(address: RepoAddress, requested: pl.DataFrame) -> pl.DataFrame:
    """Return the row valid at each time: (user_id, event_timestamp, num_events, newest_event_time_ms, row_time_us)."""
    store = open_store(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ibis and pandas warn about each other
        frame = store.get_historical_features(requested.unique().to_pandas(), _SMALL).to_df()
    joined: pl.DataFrame = pl.from_pandas(frame)
    return joined.select(
        "user_id",
        pl.col("event_timestamp").dt.convert_time_zone("UTC").dt.cast_time_unit("us"),
        pl.col("num_events").cast(pl.Int64),
        pl.col("newest_event_time_ms").cast(pl.Int64),
        pl.col("row_time_us").cast(pl.Int64),
    )
