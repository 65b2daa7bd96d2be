"""Impressions joined with clicks, against a slow search click by click."""

from datetime import date
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.experiments.join import DAY_MS, SKEW_MS, WINDOW_MS, join
from services.errors import DataError
from tests.support.click_log import Log, Truth, make_log, truth_of


def joined(log: Log, folder: Path) -> pl.DataFrame:
    """Write the log, join it, and read all days."""
    impressions, events = log.write(folder)
    return pl.concat([pl.read_parquet(day.path) for day in join(impressions, events, folder / "out")])


def clicked(table: pl.DataFrame) -> Truth:
    """Return the clicked rows in the format of the truth."""
    rows = table.filter(pl.col("clicks") > 0)
    return {
        (row["request_id"], row["shown_time_ms"], row["item_id"]): (row["clicks"], row["value"], row["clicked_time_ms"])
        for row in rows.iter_rows(named=True)
    }


@pytest.mark.parametrize("num", [3_000, pytest.param(100_000, marks=pytest.mark.grid)])
def test_the_join_is_the_truth(tmp_path: Path, num: int) -> None:
    """Late, early, duplicate and foreign clicks, visitors and repeated request ids join like in a slow search."""
    log = make_log(num, seed=1)

    table = joined(log, tmp_path)

    wanted = truth_of(log)
    assert clicked(table) == wanted
    assert len(wanted) > 300
    assert len(table) == 10 * len(
        {(impression.request_id, impression.user_id, impression.shown_time_ms) for impression in log.impressions}
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(1, 60))
def test_small_logs_join_alike(tmp_path_factory: pytest.TempPathFactory, seed: int, num: int) -> None:
    """Any small log joins like the slow search."""
    log = make_log(num, seed)
    if not log.events:
        return

    assert clicked(joined(log, tmp_path_factory.mktemp("log"))) == truth_of(log)


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    """Write rows as a file of a folder."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "0.parquet")
    return folder


SHOWN = {"request_id": "r", "user_id": "u", "shown_time_ms": 5 * DAY_MS - 1, "item_ids": ["a", "b"]}
CLICK = {"event_id": "e", "user_id": "u", "item_id": "b", "event_time_ms": 5 * DAY_MS + 9}


def test_old_records_and_columns_that_are_not_there(tmp_path: Path) -> None:
    """Old records without the new columns join by user, and the output has all columns."""
    days = list(join(write(tmp_path / "i", [SHOWN]), write(tmp_path / "e", [CLICK]), tmp_path / "out"))

    table = pl.read_parquet(days[0].path)
    assert [day.path.name for day in days] == ["1970-01-05.parquet"]
    assert table["clicks"].to_list() == [0, 1]
    assert table["position"].to_list() == [1, 2]
    assert table.select("propensity", "variant", "elapsed_ms").null_count().row(0) == (2, 2, 2)


@pytest.mark.parametrize(
    ("after_ms", "request_id", "is_joined"),
    [
        (WINDOW_MS, "r", True),
        (WINDOW_MS + 1, "r", False),
        (-SKEW_MS, "r", True),
        (-SKEW_MS - 1, "r", False),
        (WINDOW_MS, None, True),
        (WINDOW_MS + 1, None, False),
        (-1, None, False),
    ],
)
def test_the_window_s_ends(tmp_path: Path, after_ms: int, request_id: str | None, is_joined: bool) -> None:
    """The window includes its end; only clicks with a request id may be early, by the allowed clock skew."""
    click = CLICK | {
        "event_time_ms": SHOWN["shown_time_ms"] + after_ms,
        "request_id": request_id,
        "event_type": "click",
    }

    (day,) = join(write(tmp_path / "i", [SHOWN]), write(tmp_path / "e", [click]), tmp_path / "out")

    assert day.num_clicks == int(is_joined)


def test_days_are_chosen(tmp_path: Path) -> None:
    """Only the requested days are written, and a click is not moved to the previous day's impressions."""
    later = SHOWN | {"request_id": "s", "shown_time_ms": 5 * DAY_MS + 3}
    places = write(tmp_path / "i", [SHOWN, later]), write(tmp_path / "e", [CLICK])

    (day,) = join(*places, tmp_path / "out", since=date(1970, 1, 5), until=date(1970, 1, 6))

    assert (day.num_impressions, day.num_clicks) == (1, 0)


def test_a_missing_column_or_log_is_named(tmp_path: Path) -> None:
    """A log without an items column, or a missing log, is named in the error."""
    events = write(tmp_path / "e", [CLICK])
    with pytest.raises(DataError, match="item_ids"):
        list(join(write(tmp_path / "i", [{"request_id": "r", "user_id": "u", "shown_time_ms": 1}]), events, tmp_path))
    with pytest.raises(DataError, match="no Parquet file"):
        list(join(tmp_path / "none", events, tmp_path))


def test_a_file_that_the_worker_removes_after_the_listing_is_absent(tmp_path: Path) -> None:
    """The other files are joined."""
    impressions, events = write(tmp_path / "i", [SHOWN]), write(tmp_path / "e", [CLICK])
    (events / "1.parquet").symlink_to(events / "removed")

    (day,) = join(impressions, events, tmp_path / "out")

    assert (day.num_impressions, day.num_clicks) == (1, 1)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    """The error names a truncated file of the log, and no output is written."""
    impressions, events = write(tmp_path / "i", [SHOWN]), write(tmp_path / "e", [CLICK])
    (events / "1.parquet").write_bytes((events / "0.parquet").read_bytes()[:-9])

    with pytest.raises(DataError, match=r"1\.parquet"):
        list(join(impressions, events, tmp_path / "out"))

    assert not (tmp_path / "out").exists()


def test_erased_users_are_in_no_day(tmp_path: Path) -> None:
    """An erased user's rows up to the erasure are removed, also from existing output; all other rows stay."""
    at = SHOWN["shown_time_ms"]
    assert isinstance(at, int)
    rows = [
        {**SHOWN, "request_id": name, "user_id": user, "shown_time_ms": at + later}
        for name, user, later in (("r", "u", 0), ("s", "u", 10_000), ("t", "v", 0), ("w", None, 0))
    ]
    events = write(tmp_path / "e", [CLICK])
    old, new = (
        write(tmp_path / "old", rows),
        write(tmp_path / "new", [{**row, "shown_time_ms": at + 9 * DAY_MS} for row in rows[2:]]),
    )
    list(join(old, events, tmp_path / "out"))
    list(join(new, events, tmp_path / "out", erased_until={"u": at + 5_000}.get))
    list(join(old, events, tmp_path / "again", erased_until={"u": at + 5_000}.get))

    for folder, requests in (("out", {"s", "t", "w"}), ("again", {"s", "t", "w"})):
        tables = [pl.read_parquet(path) for path in (tmp_path / folder).glob("*.parquet")]
        assert {*pl.concat(tables)["request_id"]} == requests
