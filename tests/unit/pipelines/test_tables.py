"""The offline tables."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from pipelines.features.tables import HISTORY_SCHEMA, build_tables, latest_histories
from tests.support.synthetic import write_arrivals

START = datetime(2026, 1, 1, tzinfo=UTC)


def events_of(*rows: tuple[str, str, float]) -> pl.DataFrame:
    """Build events one microsecond apart: (user, item, value)."""
    return pl.DataFrame(
        {
            "user_id": [user for user, _, _ in rows],
            "item_id": [item for _, item, _ in rows],
            "event_time": [START + timedelta(microseconds=number) for number in range(len(rows))],
            "event_type": ["rating"] * len(rows),
            "value": [value for _, _, value in rows],
        },
        schema_overrides={"event_time": pl.Datetime("us", "UTC")},
    )


EVENTS = events_of(("u", "a", 1.0), ("v", "b", 2.0), ("u", "b", 3.0), ("u", "c", 5.0))


def test_tables_are_written_whole(tmp_path: Path) -> None:
    """One row an event in the history table, one a user in the latest and the base one, with the columns of the view."""
    write_arrivals(EVENTS, tmp_path)
    reported: list[tuple[int, int, str]] = []

    build_tables(tmp_path, 2, tmp_path, lambda *words: reported.append(words))
    table = pq.read_table(tmp_path / "user_history.parquet")

    assert table.schema == HISTORY_SCHEMA
    assert table["item_ids"].to_pylist() == [["a"], ["b"], ["a", "b"], ["b", "c"]]
    assert table["event_timestamp"].to_pylist() == EVENTS["event_time"].to_list()
    assert [(row.user_id, row.item_ids) for row in latest_histories(tmp_path)] == [("u", ("b", "c")), ("v", ("b",))]
    assert pq.read_table(tmp_path / "base_history.parquet")["item_ids"].to_pylist() == [["b", "c"], ["b"]]
    assert reported == [(4, 4, "histories")]
