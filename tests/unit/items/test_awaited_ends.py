"""When a caller's end of the items topic counts as reached, if the broker reports the last batch's first record.

Run: pytest tests/unit/items/test_awaited_ends.py
"""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from kafka import TopicPartition

from services.items.follower import _FETCHED_AGAIN_S, ItemFollower, _Awaited
from services.items.live_items import LiveItems
from services.settings.addresses import KafkaAddress

PLACE = TopicPartition("items", 0)
END = 10
"""The reported end: the first record of the last batch."""


@dataclass
class Fetched:
    """A consumer after a fetch: the next offset, and the end that the last fetch of the partition reported."""

    next_offset: int
    end: int | None

    def position(self, _: TopicPartition) -> int:
        return self.next_offset

    def highwater(self, _: TopicPartition) -> int | None:
        return self.end


@pytest.mark.parametrize(
    ("next_offset", "end", "waited_s", "is_empty", "is_reached"),
    [
        pytest.param(END - 1, None, 0.0, False, False, id="a record before the end is missing"),
        pytest.param(END, END, 0.0, False, False, id="an equal end may be of a fetch before the last batch"),
        pytest.param(END, END, 2 * _FETCHED_AGAIN_S, False, True, id="later fetches brought no record"),
        pytest.param(END - 1, END, 2 * _FETCHED_AGAIN_S, False, False, id="they count from the reported end on"),
        pytest.param(END, None, 0.0, True, True, id="a fetch without records"),
        pytest.param(END, END + 3, 0.0, True, False, id="a fetched end beyond the reported one"),
        pytest.param(END + 3, END + 3, 0.0, False, True, id="a fetched end that is read"),
    ],
)
def test_a_reported_end_is_believed_once_it_was_fetched_again(
    tmp_path: Path, next_offset: int, end: int | None, waited_s: float, is_empty: bool, is_reached: bool
) -> None:
    """An end that a later fetch confirms or exceeds counts; an equal end of an older fetch does not."""
    follower = ItemFollower(LiveItems(), KafkaAddress(bootstrap="unused:1"), PLACE.topic, tmp_path / "items")
    waiter = _Awaited(ends={PLACE: END}, rough={PLACE: time.monotonic() - waited_s})

    reached = follower._reached([waiter], Fetched(next_offset, end), is_empty=is_empty)

    assert reached == [waiter] * is_reached


def test_an_end_that_grew_is_awaited_only_once(tmp_path: Path) -> None:
    """Records that arrive after the first fetched end are not awaited."""
    follower = ItemFollower(LiveItems(), KafkaAddress(bootstrap="unused:1"), PLACE.topic, tmp_path / "items")
    waiter = _Awaited(ends={PLACE: END}, rough={PLACE: time.monotonic()})

    reached = [
        follower._reached([waiter], Fetched(next_offset, end), is_empty=False)
        for next_offset, end in ((END, END + 3), (END + 2, END + 5), (END + 3, END + 9))
    ]

    assert reached == [[], [], [waiter]]
