"""What rows state: the same item from text as from types, and errors that name the column."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.imports.values import Columns, event_of, item_of, time_ms
from services.errors import ConfigError, DataError, InvalidRequest

NUMBERS = Columns(numbers=frozenset({"price"}), flags=frozenset({"new"}))


def test_text_and_types_state_the_same_item() -> None:
    """A CSV row with its numbers and flags named is the row of a database."""
    text = {
        "item_id": " sku-1 ",
        "title": "Red shirt",
        "categories": "shirts| red ",
        "available": "false",
        "published_ms": "2026-01-02T00:00:00Z",
        "price": "9.5",
        "new": "yes",
        "colour": "red",
        "value": "",
    }
    typed = {
        "item_id": "sku-1",
        "title": "Red shirt",
        "categories": ["shirts", "red"],
        "available": False,
        "published_ms": date(2026, 1, 2),
        "price": Decimal("9.5"),
        "new": True,
        "colour": "red",
        "value": None,
    }

    state = item_of(text, NUMBERS)
    assert state == item_of(typed, Columns())
    assert state.attributes == {"price": 9.5, "new": True, "colour": "red"}


def test_fields_have_other_columns_where_they_are_named() -> None:
    """The named column is the field, and the field's own name is free."""
    state = item_of({"sku": 7, "name": "Hat"}, Columns(names={"item_id": "sku", "title": "name"}))

    assert (state.item_id, state.title, state.attributes) == ("7", "Hat", {})


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"item_id": "", "title": "x"}, "item_id"),
        ({"item_id": 1.5}, "item_id"),
        ({"item_id": "a", "title": "x" * 2_000}, "title"),
        ({"item_id": "a", "available": "perhaps"}, "available"),
        ({"item_id": "a", "published_ms": "soon"}, "published_ms"),
        ({"item_id": "a", "value": "dear"}, "value"),
        ({"item_id": "a", "price": "dear"}, "price"),
        ({"item_id": "a", "new": "perhaps"}, "new"),
        ({"item_id": "a", "colour": "x" * 300}, "colour"),
        ({"item_id": "a", "popularity": "1"}, "popularity"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_by_its_column(row: dict[str, Any], column: str) -> None:
    """The error has the column of the source and what to send instead."""
    with pytest.raises(InvalidRequest) as caught:
        item_of(row, NUMBERS)

    assert caught.value.field == column
    assert caught.value.fix


def test_missing_and_unknown_columns_are_named() -> None:
    """Before any row is read."""
    with pytest.raises(DataError, match=r"column item_id: missing among sku; --column item_id="):
        Columns().check({"sku": "1"}, "items")
    with pytest.raises(DataError, match=r"column event_time: missing"):
        Columns().check({"user_id": "u", "item_id": "i"}, "events")
    with pytest.raises(ConfigError, match=r"--column: name is no field of items"):
        Columns(names={"name": "title"}).check({"item_id": "1", "title": "x"}, "items")


@given(st.datetimes(datetime(2005, 1, 1), datetime(2090, 1, 1)), st.integers(-14, 14))
def test_a_time_is_the_same_in_all_its_forms(when: datetime, hours: int) -> None:
    """ISO 8601 with a zone or without, seconds, milliseconds, a datetime."""
    aware = when.replace(microsecond=0, tzinfo=UTC)
    ms = int((aware - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()) * 1_000
    moved = (aware + timedelta(hours=hours)).replace(tzinfo=None).isoformat() + f"{hours:+03d}:00"
    forms = [aware, aware.replace(tzinfo=None), aware.isoformat(), aware.replace(tzinfo=None).isoformat(), moved]

    assert {time_ms("at", form) for form in (*forms, ms // 1_000, str(ms // 1_000), ms, str(ms))} == {ms}


def test_an_event_without_id_has_one_of_its_content() -> None:
    """The same row is the same event, in whichever form it is written; another value makes it another."""
    row = {"user_id": "u1", "item_id": "i1", "event_time": "2026-01-02T03:04:05Z", "value": "4"}
    same = {"user_id": "u1", "item_id": "i1", "event_time": 1767323045, "value": 4.0, "extra": "x"}

    assert event_of(row, Columns()) == event_of(same, Columns())
    assert event_of(row | {"value": "5"}, Columns()).event_id != event_of(row, Columns()).event_id
    assert event_of(row | {"event_id": "e1"}, Columns()).event_id == "e1"


@pytest.mark.parametrize("column", ["user_id", "item_id", "event_time"])
def test_an_event_without_what_it_needs_names_the_column(column: str) -> None:
    """Also under another name."""
    row = {"user_id": "u1", "item_id": "i1", "event_time": 1767323045}
    row["own"] = row.pop(column) and ""
    with pytest.raises(InvalidRequest) as caught:
        event_of(row, Columns(names={column: "own"}))

    assert caught.value.field == "own"
