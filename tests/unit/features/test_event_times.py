"""Times of events from the offline table: `pytest tests/unit/features/test_event_times.py`."""

from pathlib import Path

import polars as pl

from services.features.event_times import read_event_times


def test_times_are_those_of_one_user_by_number(tmp_path: Path) -> None:
    """Each of a user's rows tells the time of its newest event; other users' rows are left out."""
    table = tmp_path / "user_history.parquet"
    rows = [("u", 1, 100), ("v", 1, 7), ("u", 2, 250)]
    pl.DataFrame(rows, schema=["user_id", "num_events", "newest_event_time_ms"], orient="row").write_parquet(table)

    assert read_event_times(table, "u") == {1: 100, 2: 250}
    assert read_event_times(table, "nobody") == {}


def test_without_a_table_nothing_is_known(tmp_path: Path) -> None:
    """A gateway on a machine of its own has no offline table."""
    assert read_event_times(tmp_path / "nothing.parquet", "u") == {}
