"""Rows and their columns."""

from dataclasses import replace
from typing import Any

import pytest

from services.features.schema import (
    POPULARITY,
    STRING,
    USER_HISTORY,
    USER_RECOMMENDATIONS,
    Column,
    LogPosition,
    PopularRow,
    PopularWindow,
    PrecomputedRow,
    UserHistory,
    ViewSchema,
    event_digest,
)


def test_a_position_covers_itself_and_what_lies_before_it_in_the_same_log() -> None:
    """Equal and older offsets are covered; another topic id or partition is another log."""
    here = LogPosition("t", 0, 5)

    assert here.covers(LogPosition("t", 0, 5))
    assert here.covers(LogPosition("t", 0, 0))
    assert not here.covers(LogPosition("t", 0, 6))
    assert not here.covers(LogPosition("other", 0, 0))
    assert not here.covers(LogPosition("t", 1, 0))


HISTORY = UserHistory(
    user_id="u",
    item_ids=("a", "b"),
    newest_event_time_ms=7,
    num_events=2,
    row_time_us=8,
    position=LogPosition("t", 1, 5),
    recent_event_digests=event_digest("e1") + event_digest("e2"),
)
LISTED = PrecomputedRow(user_id="u", item_ids=("x",), scores=(0.5,), bundle_version="v", made_from_row_us=7)
POPULAR = PopularRow(
    partition=3,
    as_of_ms=9,
    windows={"1h": PopularWindow(("a",), (2,)), "24h": PopularWindow(), "7d": PopularWindow(("b", "a"), (3, 2))},
)


@pytest.mark.parametrize(
    ("view", "row"), [(USER_HISTORY, HISTORY), (USER_RECOMMENDATIONS, LISTED), (POPULARITY, POPULAR)]
)
def test_a_row_is_read_back_as_it_was_laid_out(view: ViewSchema[Any], row: Any) -> None:
    """Rows survive the conversion to columns; rows that the store does not hold are skipped."""
    table = view.to_columns([row])
    keys = {column.name for column in view.keys}
    absent = {name: [None if name not in keys else "9", *cells] for name, cells in table.items()}

    assert list(table) == [column.name for column in view.columns]
    assert view.from_columns(table) == view.from_columns(absent) == [row]


def test_a_column_added_later_has_its_default() -> None:
    """Rows stored before a column existed get the column's default; lists default to empty."""
    view = replace(
        USER_HISTORY, features=(*USER_HISTORY.features, Column("channel", STRING, default="web")), build=dict
    )
    table = {**USER_HISTORY.to_columns([HISTORY]), "channel": [None], "disliked_item_ids": [None]}

    (row,) = view.from_columns(table)

    assert (row["channel"], row["disliked_item_ids"]) == ("web", ())


def test_a_row_with_event_ids_is_read_with_their_digests() -> None:
    """Event ids of older rows become digests; new rows store no ids."""
    table = USER_HISTORY.to_columns([HISTORY])
    del table["recent_event_digests"]

    (before,) = USER_HISTORY.from_columns({**table, "recent_event_ids": [["e1", "e2"]]})
    (between,) = USER_HISTORY.from_columns({**USER_HISTORY.to_columns([HISTORY]), "recent_event_ids": [["e3"]]})

    assert before == HISTORY
    assert between.recent_event_digests == HISTORY.recent_event_digests + event_digest("e3")
    assert table["recent_event_ids"] == [[]]
