"""Sliding windows of popularity. Run: pytest tests/unit/stream/test_popularity.py."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.features.schema import WINDOW_MS, LogPosition, PopularWindow
from services.stream.aggregate import LoggedEvent
from services.stream.popularity import PopularityCounter

HOUR_MS = WINDOW_MS["1h"]
NOW_MS = 1_000 * HOUR_MS


def event(offset: int, item_id: str, age_ms: int = 0, *, topic: str = "t", event_id: str | None = None) -> LoggedEvent:
    """Build an event of a given age."""
    name = f"{topic}{offset}" if event_id is None else event_id
    return LoggedEvent("u", item_id, name, (NOW_MS - age_ms) * 1_000, LogPosition(topic, 0, offset))


def test_each_window_counts_what_lies_within_it() -> None:
    """An event of two hours ago is no longer of the last hour, but of the last day and week."""
    counts = PopularityCounter()
    for one in (event(0, "old", 2 * HOUR_MS), event(1, "new"), event(2, "new")):
        counts.add(one)

    top = counts.top(NOW_MS, 10)

    assert top["1h"] == PopularWindow(("new",), (2,))
    assert top["24h"] == top["7d"] == PopularWindow(("new", "old"), (2, 1))


def test_windows_slide_without_events() -> None:
    """Counts leave the hour first and the week last; an event of a clock 30 hours ahead counts when its time has come."""
    counts = PopularityCounter()
    for one in (event(0, "ahead", -30 * HOUR_MS), event(1, "now")):
        counts.add(one)

    tops = [counts.top(NOW_MS + hours * HOUR_MS, 10) for hours in (0, 2, 30, 32, 300)]

    assert [top["1h"].item_ids for top in tops] == [("now",), (), ("ahead",), (), ()]
    assert ["now" in top["24h"].item_ids for top in tops] == [True, True, False, False, False]
    assert ["now" in top["7d"].item_ids for top in tops] == [True, True, True, True, False]


def test_event_ids_are_each_users_own() -> None:
    """Two users whose events are numbered alike both count."""
    counts = PopularityCounter()
    counts.add(event(0, "a", event_id="1"))
    counts.add(replace(event(1, "a", event_id="1"), user_id="v"))

    assert counts.top(NOW_MS, 10)["1h"] == PopularWindow(("a",), (2,))


def test_a_replay_counts_nothing_twice() -> None:
    """Offsets are skipped even when their event ids are forgotten, and retries by their id; a topic made anew is counted."""
    forgetful = PopularityCounter(max_event_ids=1)
    for offset in (0, 1, 0, 1):
        forgetful.add(event(offset, "a"))
    counts = PopularityCounter()
    log = [event(0, "a"), event(1, "a"), event(2, "b", event_id="t1")]
    for one in (*log, *log, event(0, "a", topic="anew")):
        counts.add(one)

    assert counts.top(NOW_MS, 10)["1h"] == PopularWindow(("a",), (3,))
    assert forgetful.top(NOW_MS, 10)["1h"] == PopularWindow(("a",), (2,))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-HOUR_MS, 3 * HOUR_MS)), max_size=60), st.integers(1, 4))
def test_counts_equal_a_plain_count(events: list[tuple[str, int]], num_items: int) -> None:
    """Oracle: count all events of the window and sort, ties by item id; the edge may be off by one bucket."""
    counts = PopularityCounter()
    for offset, (item_id, age_ms) in enumerate(events):
        counts.add(event(offset, item_id, age_ms))

    bucket_ms = HOUR_MS // 12
    oldest = NOW_MS // bucket_ms - 12
    newest = NOW_MS // bucket_ms
    plain = Counter(item_id for item_id, age_ms in events if oldest <= (NOW_MS - age_ms) // bucket_ms <= newest)
    ranked = sorted(plain.items(), key=lambda entry: (-entry[1], entry[0]))[:num_items]

    top = counts.top(NOW_MS, num_items)["1h"]

    assert list(zip(top.item_ids, top.counts, strict=True)) == ranked
