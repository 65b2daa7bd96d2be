"""Popularity scores and event times."""

from pathlib import Path

import polars as pl
import pytest

from services.features.reader import merge_popularity, read_event_times
from services.features.schema import WINDOW_MS, PopularRow, PopularWindow

NOW_MS = 1_790_000_000_000


def row(as_of_ms: int, **windows: dict[str, int]) -> PopularRow:
    """Build a partition's row; windows not given are empty."""
    full = {name: windows.get(f"w{name}", {}) for name in WINDOW_MS}
    return PopularRow(
        partition=0,
        as_of_ms=as_of_ms,
        windows={name: PopularWindow(tuple(counts), tuple(counts.values())) for name, counts in full.items()},
    )


def test_scores_are_events_per_hour_summed_over_windows_and_partitions() -> None:
    """24 events within a day weigh as much as one event within the hour; ties are ordered by item id."""
    rows = [row(NOW_MS, w7d={"c": 168}, w24h={"b": 24}), row(NOW_MS, w1h={"a": 1}), row(NOW_MS, w1h={"a": 1})]

    merged = merge_popularity(rows, now_ms=NOW_MS)

    assert merged.weights == [("a", pytest.approx(2.0)), ("b", pytest.approx(1.0)), ("c", pytest.approx(1.0))]


def test_windows_older_than_their_length_are_left_out() -> None:
    """A window expires once its row is as old as the window is long, and counts until then."""
    last = row(NOW_MS, w1h={"a": 9}, w24h={"b": 1})

    before, after = (merge_popularity([last], NOW_MS + WINDOW_MS["1h"] + more_ms) for more_ms in (-1, 0))

    assert [item_id for item_id, _ in before.weights] == ["a", "b"]
    assert [item_id for item_id, _ in after.weights] == ["b"]


def test_times_are_those_of_one_user_by_number(tmp_path: Path) -> None:
    """Each of a user's rows has the time of its newest event; a missing table or user gives an empty result."""
    table = tmp_path / "user_history.parquet"
    rows = [("u", 1, 100), ("v", 1, 7), ("u", 2, 250)]
    pl.DataFrame(rows, schema=["user_id", "num_events", "newest_event_time_ms"], orient="row").write_parquet(table)

    assert read_event_times(table, "u") == {1: 100, 2: 250}
    assert read_event_times(table, "nobody") == read_event_times(tmp_path / "nothing.parquet", "u") == {}
