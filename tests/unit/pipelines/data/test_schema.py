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


MISSING, NO_VALUES = (f"{problem} .* in clicks.csv; expected for example" for problem in ("missing among", "of type"))
FLOATS = "of floating-point numbers.*write the ids as text or integers"


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        *((column, None, MISSING) for column in ("user_id", "item_id", "event_time")),
        *((column, [17.0, None], FLOATS) for column in ("user_id", "item_id")),
        ("user_id", [["u"], ["v"]], NO_VALUES),
        ("item_id", [{"id": "a"}, {"id": "b"}], NO_VALUES),
        ("event_time", [[10], [20]], NO_VALUES),
        ("value", [[1.0], [2.0]], NO_VALUES),
        ("event_type", [["buy"], []], NO_VALUES),
        ("user_id", [b"u", b"\xff"], NO_VALUES),
        ("event_time", ["soon", "later"], "not one row can be used, such as 'soon' in clicks.csv"),
    ],
)
def test_a_column_that_cannot_be_used_is_refused_by_its_name(column, values, problem) -> None:
    """One that is missing, of lists, structures, bytes or floating-point ids, or without one readable row: the table is wrong and not a row."""
    table = events().drop(column) if values is None else events(**{column: values})

    with pytest.raises(DataError, match=f"column {column}: {problem}") as refused:
        check_events(table, ITEMS, "clicks.csv")

    assert refused.value.column == column


@pytest.mark.parametrize(
    ("written", "value", "num_unread"),
    [("abc", 1.0, 1), ("1e999", 1.0, 1), ("NaN", 1.0, 0), ("", 1.0, 0), (None, 1.0, 0), (" 2.5 ", 2.5, 0)],
)
def test_a_value_that_is_no_number_costs_the_value_and_not_the_event(written, value, num_unread) -> None:
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
    note = "items: 1 without a title are kept under their id, such as item_id=a"
    assert [str(one) for one in checked.notes] == [note]


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
def test_repeated_item_keeps_its_first_row_with_a_title(titles, kept, num_set_aside) -> None:
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
