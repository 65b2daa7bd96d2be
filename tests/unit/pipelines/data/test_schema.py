"""The schema of the input tables: what is read, what is set aside, and what is refused."""

from datetime import UTC, datetime

import polars as pl
import pytest

from pipelines.data.schema import check_events, check_items, order_events
from services.errors import DataError

ITEMS = pl.Series(["a", "b"])


def events(**columns: list[object]) -> pl.DataFrame:
    """Two good events, with columns replaced."""
    good: dict[str, list[object]] = {"user_id": ["u", "v"], "item_id": ["a", "b"], "event_time": [10, 20]}
    return pl.DataFrame({**good, **columns})


@pytest.mark.parametrize("column", ["user_id", "item_id", "event_time"])
def test_missing_column_is_named_with_an_example(column: str) -> None:
    """A table without a required column is refused, naming it."""
    with pytest.raises(DataError, match=f"column {column}: missing .* for example") as caught:
        check_events(events().drop(column), ITEMS)

    assert caught.value.column == column


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([1_795_262_400, 1_795_262_401], datetime(2026, 11, 21, 12, tzinfo=UTC)),
        ([1_795_262_400_000, 1_795_262_401_000], datetime(2026, 11, 21, 12, tzinfo=UTC)),
        ([1_795_262_400.25, 1_795_262_401.0], datetime(2026, 11, 21, 12, 0, 0, 250_000, tzinfo=UTC)),
        (["2026-11-21T12:00:00Z", "2026-11-21T12:00:01Z"], datetime(2026, 11, 21, 12, tzinfo=UTC)),
        (["2026-11-21T13:00:00.5+01:00", "x"], datetime(2026, 11, 21, 12, 0, 0, 500_000, tzinfo=UTC)),
        (["2026-11-21 12:00:00", "x"], datetime(2026, 11, 21, 12, tzinfo=UTC)),
        (["2026-11-21", "x"], datetime(2026, 11, 21, tzinfo=UTC)),
        (["1795262400", "x"], datetime(2026, 11, 21, 12, tzinfo=UTC)),
        ([datetime(2026, 11, 21, 12), datetime(2026, 11, 22)], datetime(2026, 11, 21, 12, tzinfo=UTC)),
    ],
)
def test_times_are_read_in_every_documented_form(written: list[object], expected: datetime) -> None:
    """Unix seconds and milliseconds, ISO text with and without zone, and datetimes all mean the same instant."""
    checked = check_events(events(event_time=written), ITEMS)

    assert checked.good["event_time"][0] == expected


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"user_id": ["", "v"]}, "user_id"),
        ({"user_id": ["x" * 257, "v"]}, "user_id"),
        ({"user_id": ["line\nbreak", "v"]}, "user_id"),
        ({"item_id": [None, "b"]}, "item_id"),
        ({"item_id": ["nowhere", "b"]}, "item_id not in items"),
        ({"event_time": ["soon", "20"]}, "event_time"),
        ({"event_time": [-5, 20]}, "event_time"),
        ({"event_time": ["9999-12-31", "2026-01-01"]}, "event_time"),
        ({"event_time": ["9000000000", "2026-01-01"]}, "event_time"),
        ({"event_time": [datetime(2100, 1, 1), datetime(2026, 1, 1)]}, "event_time"),
        ({"event_time": [datetime(1900, 1, 1), datetime(2026, 1, 1)]}, "event_time"),
        ({"value": ["much", "2"]}, "value"),
        ({"value": [float("nan"), 2.0]}, "value"),
    ],
)
def test_bad_row_is_set_aside_with_its_reason(columns: dict[str, list[object]], reason: str) -> None:
    """One bad row costs that row alone, and is kept as it was written; so does a placeholder for `never`, which no feature table can hold."""
    checked = check_events(events(**columns), ITEMS)

    assert checked.good["user_id"].to_list() == ["v"]
    assert checked.rejected["reason"].to_list() == [reason]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("user_id", [["u"], ["v"]]),
        ("item_id", [{"id": "a"}, {"id": "b"}]),
        ("event_time", [[10], [20]]),
        ("value", [[1.0], [2.0]]),
        ("event_type", [["buy"], []]),
        ("user_id", [b"u", b"\xff"]),
    ],
)
def test_column_that_holds_no_plain_values_is_named_with_its_table(column: str, values: list[object]) -> None:
    """Lists, structures and bytes that are no text are a mistake of the table, and refused in one line."""
    with pytest.raises(DataError, match=rf"column {column}: of type .* in clicks\.parquet; expected for example"):
        check_events(events(**{column: values}), ITEMS, "clicks.parquet")


@pytest.mark.parametrize("column", ["user_id", "item_id"])
def test_floating_point_ids_are_refused(column: str) -> None:
    """Integers beside missing values are floating-point numbers in many tools: 17 would be learned as '17.0', which no request names."""
    with pytest.raises(
        DataError, match=rf"column {column}: of floating-point numbers.*write the ids as text or integers"
    ):
        check_events(events(**{column: [17.0, None]}), ITEMS)


def test_nan_is_no_title() -> None:
    """A NaN in a column of numbers is a missing value and not the text 'NaN'."""
    checked = check_items(pl.DataFrame({"item_id": ["a", "b"], "title": [float("nan"), 300.5]}))

    assert checked.good["item_id"].to_list() == ["b"]
    assert checked.rejected["reason"].to_list() == ["title"]


def test_column_without_one_readable_row_stops() -> None:
    """When no row's time can be read, the column is wrong and not the rows."""
    with pytest.raises(DataError, match=r"column event_time: not one row can be used, such as 'soon' in clicks\.csv"):
        check_events(events(event_time=["soon", "later"]), ITEMS, "clicks.csv")


def test_optional_columns_have_defaults() -> None:
    """Without event_type and value an event is an interaction worth 1."""
    good = check_events(events(), ITEMS).good

    assert good["event_type"].to_list() == ["interaction", "interaction"]
    assert good["value"].to_list() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("categories", "expected"),
    [(["Drama|War", None], [["Drama", "War"], []]), ([["Drama", " "], []], [["Drama"], []])],
)
def test_categories_are_lists_or_text_with_bars(categories: list[object], expected: list[list[str]]) -> None:
    """A category column may be a list or text split at bars; blanks are no category."""
    checked = check_items(pl.DataFrame({"item_id": ["a", "b"], "title": ["A", "B"], "categories": categories}))

    assert checked.good["categories"].to_list() == expected


@pytest.mark.parametrize(
    ("titles", "kept", "reason"),
    [(["first", "second"], "first", "item_id repeated"), ([None, "second"], "second", "title")],
)
def test_repeated_item_keeps_its_first_usable_row(titles: list[str | None], kept: str, reason: str) -> None:
    """A repeated item id is one item; a row that is rejected for itself does not reject the others."""
    checked = check_items(pl.DataFrame({"item_id": ["a", "a"], "title": titles}))

    assert checked.good["title"].to_list() == [kept]
    assert checked.rejected["reason"].to_list() == [reason]


@pytest.mark.parametrize(
    ("users", "times", "expected"),
    [("uu", [5, 5], [5, 6]), ("uuu", [5, 5, 6], [5, 6, 7]), ("uv", [5, 5], [5, 5])],
)
def test_ties_of_one_user_move_apart_in_file_order(users: str, times: list[int], expected: list[int]) -> None:
    """Times rise strictly within a user, in the file's order, pushing close followers on; users do not push each other."""
    written = [datetime(2026, 1, 1, microsecond=micros, tzinfo=UTC) for micros in times]
    frame = pl.DataFrame({"user_id": list(users), "item_id": list("bab")[: len(users)], "event_time": written})

    ordered = order_events(check_events(frame, ITEMS).good)

    assert ordered["item_id"].to_list() == frame["item_id"].to_list()
    assert [time.microsecond for time in ordered["event_time"]] == expected
