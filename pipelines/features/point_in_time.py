"""What was known of users at given times: Feast's point-in-time join, and the histories that it names.

Feast's join pairs each row that is asked for with all earlier rows of its user before it keeps the newest; with the lists
of item ids in it, that takes gigabytes. So the join decides on small columns alone (which row: the user's nth), and the
list of that row is fetched afterwards by its exact key. The decision what was known when stays Feast's.

The join runs in a process of its own: its memory is given back before training begins, and duckdb and torch in one process
end it with pages of complaints about leaked types.
"""

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import polars as pl

from services.features.repo import USER_HISTORY_TABLE, RepoAddress, open_store

if TYPE_CHECKING:
    import pandas as pd

_DECIDING = ["user_history:num_events", "user_history:newest_event_time_ms"]


def histories_as_of(address: RepoAddress, rows: "pd.DataFrame") -> "pd.DataFrame":
    """Return each row (user_id, event_timestamp in UTC) with `history_item_ids`, oldest first, and what describes them.

    A history holds exactly the events at or before the timestamp: ask as of the microsecond before an event that must not
    be seen. Rows keep their order; a user without events by then has an empty list, `num_events` 0 and no
    `newest_event_time_ms`. Needs `pipelines.features.features.serve` to have been run.
    """
    asked = pl.from_pandas(rows[["user_id", "event_timestamp"]]).with_columns(
        pl.col("event_timestamp").dt.convert_time_zone("UTC").dt.cast_time_unit("us")
    )
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        decided = child.submit(_decide, address, asked).result()
    history = pl.scan_parquet(address.table_path(USER_HISTORY_TABLE)).select(
        "user_id", "num_events", history_item_ids="item_ids"
    )
    wanted = decided.select("user_id", "num_events").drop_nulls().unique()
    lists = wanted.lazy().join(history, on=["user_id", "num_events"], how="inner").collect(engine="streaming")
    found = decided.join(lists, on=["user_id", "num_events"], how="left")
    answer = asked.join(found, on=["user_id", "event_timestamp"], how="left", maintain_order="left")
    return answer.with_columns(pl.col("num_events").fill_null(0), pl.col("history_item_ids").fill_null([])).to_pandas()


def _decide(address: RepoAddress, asked: pl.DataFrame) -> pl.DataFrame:
    """Let Feast say which row was valid when: (user_id, event_timestamp, num_events, newest_event_time_ms)."""
    store = open_store(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ibis and pandas about each other
        joined = store.get_historical_features(asked.unique().to_pandas(), _DECIDING).to_df()
    decided: pl.DataFrame = pl.from_pandas(joined)
    return decided.select(
        "user_id",
        pl.col("event_timestamp").dt.convert_time_zone("UTC").dt.cast_time_unit("us"),
        pl.col("num_events").cast(pl.Int64),
        pl.col("newest_event_time_ms").cast(pl.Int64),
    )
