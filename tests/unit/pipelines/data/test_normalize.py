"""Tables as spreadsheets, pandas and exports write them become the tables that were meant, and what was changed is named."""

import re
from typing import Any

import polars as pl
import pytest

from pipelines.data.normalize import Raw, normalize
from services.errors import DataError


def tables(events: dict[str, list[Any]], items: dict[str, list[Any]]) -> tuple[Raw, Raw]:
    """Raw tables with these columns."""
    return Raw("events", "clicks.csv", pl.DataFrame(events)), Raw("items", "films.csv", pl.DataFrame(items))


@pytest.mark.parametrize(
    ("user_ids", "item_ids", "users", "items"),
    [
        (["12.0", "7.0", ""], ["3", "4", "5"], ["12", "7", None], ["3", "4", "5"]),
        ([12.0, float("nan"), None], ["3.0", "4.00", "0.0"], ["12", None, None], ["3", "4", "0"]),
        (["12.0", "12", "-1.0"], ["012", "13.0", "x"], ["12", "12", "-1"], ["012", "13", "x"]),
        (["u1", "1.5", "2"], ["012.0", "1.2.0", "a.0"], ["u1", "1.5", "2"], ["012.0", "1.2.0", "a.0"]),
        ([" u1", "u2\t", "u3"], ["nan", "None", "NaN"], ["u1", "u2", "u3"], [None, None, None]),
    ],
)
def test_ids_are_read_as_they_were_before_a_tool_wrote_them(user_ids, item_ids, users, items) -> None:
    """12.0 is 12, in text and in numbers; a leading zero, or a fraction among other text, makes no number; blanks go; a word for nothing is no id."""
    of_items = {"item_id": item_ids, "title": ["A", "B", "C"]}
    (events, films), notes = normalize(*tables({"user_id": user_ids, "item_id": item_ids}, of_items))

    assert events["user_id"].to_list() == users
    assert events["item_id"].to_list() == films["item_id"].to_list() == items
    assert bool(notes) == ((users, items) != (user_ids, item_ids))


def test_what_was_changed_is_named_with_its_number_and_an_example() -> None:
    """One note a table and column."""
    events = {"user_id": ["12.0", "nan", "7.0 "], "item_id": [1, 2, 3]}
    _, notes = normalize(*tables(events, {"item_id": ["1.0", "2.0", "3.0"], "title": ["A", "B", "C"]}))

    assert [str(note) for note in notes] == [
        "events: 1 values of column user_id have blanks around them, which are taken off",
        "events: 1 values of column user_id are words for a missing one, such as nan",
        "events: 2 ids of column user_id are written as floating-point numbers and read as integers, such as 12.0 as 12",
        "items: 3 ids of column item_id are written as floating-point numbers and read as integers, such as 1.0 as 1",
    ]


def test_item_ids_of_both_tables_are_read_alike() -> None:
    """Where the items show that ids have fractions, 2.0 of the events is the item 2.0."""
    of_events = {"user_id": ["u", "u"], "item_id": ["2.0", "usb"]}
    of_items = {"item_id": ["2.0", "3.1", "usb"], "title": ["A", "B", "C"]}
    (events, films), notes = normalize(*tables(of_events, of_items))

    assert events["item_id"].to_list() == ["2.0", "usb"]
    assert films["item_id"].to_list() == ["2.0", "3.1", "usb"]
    assert ["all stay as they are written" in note.what for note in notes] == [True, True]


@pytest.mark.parametrize(
    ("values", "example"),
    [
        (["12.0", "13.5", ""], "13.5"),
        ([12.0, 13.5, None], "13.5"),
        ([1.0, float("inf"), 2.0], "inf"),
        ([2.0**53, 1.0, 2.0], "9007199254740992.0"),
        (["1.2345678901234568e+18", "12.0", "13.0"], "1.2345678901234568e+18"),
    ],
)
def test_ids_that_are_no_whole_numbers_are_refused(values: list[Any], example: str) -> None:
    """A column of fractions, or of numbers too large to have all their digits, holds no ids: the error names it, one of them and the fix."""
    words = rf"user_id: of floating-point numbers, such as {re.escape(example)}, in clicks.csv; write the ids"

    with pytest.raises(DataError, match=words):
        normalize(*tables({"user_id": values}, {"item_id": ["a"]}))


def test_a_header_is_read_whatever_its_case_and_blanks() -> None:
    """The exact name comes first; of two others none is chosen."""
    given = {"User ID": ["u"], "itemId": ["a"], " EVENT_TIME": [1], "user-id-2": ["x"]}

    (events, films), notes = normalize(*tables(given, {"item_id": ["a"], "Item_ID": ["b"], "TITLE": ["A"]}))

    assert events.columns == ["user_id", "item_id", "event_time", "user-id-2"]
    assert films.columns == ["item_id", "Item_ID", "title"]
    assert str(notes[0]) == "events: column 'User ID' is read as user_id"
    with pytest.raises(DataError, match=r"column user_id: there as 'User_ID' and 'USER_ID' in clicks\.csv"):
        normalize(*tables({"User_ID": ["u"], "USER_ID": ["u"]}, {}))


@pytest.mark.parametrize(
    ("values", "is_noted"),
    [
        (["kitchen, garden", "kitchen"], True),
        (["Home, living|sale", "kitchen"], False),
        (["kitchen", None], False),
        ([["Home, living"], ["kitchen"]], False),
    ],
)
def test_categories_parted_by_commas_are_noted(values: list[object], is_noted: bool) -> None:
    """Each is one category, which no request would name; with a | somewhere, or as lists, the commas are meant."""
    given = {"item_id": ["a", "b"], "title": ["A", "B"], "categories": values}
    (_, films), notes = normalize(*tables({"user_id": ["u"], "item_id": ["a"], "event_time": ["1"]}, given))

    assert films["categories"].to_list() == values
    noted = "items: 1 values of column categories hold a comma and are one category each; part several by |"
    assert [str(note).partition(", such as")[0] for note in notes] == [noted] * is_noted
