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


@pytest.mark.parametrize(
    ("written", "value", "num_unread"),
    [("abc", 1.0, 1), ("1e999", 1.0, 1), ("NaN", 1.0, 0), ("", 1.0, 0), (None, 1.0, 0), (" 2.5 ", 2.5, 0)],
)
def test_a_value_that_is_no_number_costs_the_value_and_not_the_event(
    written: str | None, value: float, num_unread: int
) -> None:
    """It counts as one that is missing, and is counted and named."""
    checked = check_events(events(value=[written, "2"]), ITEMS)

    assert checked.good["value"].to_list() == [value, 2.0]
    assert checked.num_unread_values == num_unread == len(checked.notes)
    assert all(str(note).endswith(f", value={written}") for note in checked.notes)


@pytest.mark.parametrize("titles", [[None, "Rake"], ["", "Rake"], [" ", "Rake"], [float("nan"), 300.5]])
def test_an_item_without_a_title_is_kept_under_its_id(titles: list[object]) -> None:
    """It is counted and named."""
    checked = check_items(pl.DataFrame({"item_id": ["a", "b"], "title": titles}))

    assert checked.good["title"].to_list() == ["a", str(titles[1])]
    assert [str(note) for note in checked.notes] == [
        "items: 1 without a title are kept under their id, such as item_id=a"
    ]


def test_equal_events_are_one_however_they_are_written() -> None:
    """Same user, item, time, type and value; the first stays, and the others are counted and named. Rows that cannot be used have to be equal in all."""
    rows = [
        ("u", "a", "10", None, "click", "s1"),
        ("u", "a", "1970-01-01T00:00:10Z", "1.0", "click", "s2"),
        ("u", "a", "10", "1", "buy", "s1"),
        ("u", "a", "10", "2", "click", "s1"),
        ("v", "a", "10", "1", "click", "s1"),
        ("v", "a", "10.0", "1", "click", "s1"),
        ("", "a", "10", "1", "click", "s1"),
        ("", "a", "10", "1", "click", "s2"),
        ("", "a", "10", "1", "click", "s2"),
    ]
    columns = ["user_id", "item_id", "event_time", "value", "event_type", "session"]

    checked = check_events(pl.DataFrame(rows, columns, orient="row"), ITEMS)

    assert checked.good.select("user_id", "event_type", "value").rows() == [
        ("u", "click", 1.0), ("u", "buy", 1.0), ("u", "click", 2.0), ("v", "click", 1.0)
    ]  # fmt: skip
    assert checked.rejected["session"].to_list() == ["s1", "s2"]
    assert checked.num_duplicates == 3
    duplicates, values = map(str, checked.notes)
    assert duplicates.startswith(
        "events: 3 exact duplicates (same user, item, time, type and value) are dropped; a finer"
    )
    assert duplicates.endswith("such as user_id=u, item_id=a, event_time=1970-01-01 00:00:10+00:00")
    assert values.startswith("events: 1 that differ from another row in the value alone are kept, such as user_id=u")


def test_an_event_id_tells_equal_events_apart() -> None:
    """With it a day may be the finest time. It never makes one event of rows that differ."""
    frame = events(user_id=["u", "u", "u", "u"], item_id=["a", "a", "a", "b"], event_time=["2026-01-01"] * 4)

    checked = check_events(frame.with_columns(event_id=pl.Series([1, 2, 2, 2])), ITEMS, kept=["event_id"])

    assert checked.good.select("item_id", "event_id").rows() == [("a", "1"), ("a", "2"), ("b", "2")]


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
    ("titles", "kept", "num_set_aside"),
    [(["first", "second"], "first", 1), ([None, "second", None], "second", 1), (["first", "first"], "first", 0)],
)
def test_repeated_item_keeps_its_first_row_with_a_title(
    titles: list[str | None], kept: str, num_set_aside: int
) -> None:
    """The others are set aside, unless they are equal to it or to each other: an exact duplicate is dropped and counted."""
    frame = pl.DataFrame({"item_id": ["a"] * len(titles), "title": titles, "categories": [["x", "y"]] * len(titles)})

    checked = check_items(frame)

    assert checked.good["title"].to_list() == [kept]
    assert checked.rejected["reason"].to_list() == ["item_id repeated"] * num_set_aside
    assert checked.num_duplicates == len(titles) - 1 - num_set_aside


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
