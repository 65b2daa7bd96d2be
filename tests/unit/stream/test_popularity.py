"""Sliding windows of popularity."""

import tracemalloc
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from models.registry.bundle_follower import Serving
from models.registry.store import BundleStore
from services.contracts.event_roles import parse_event_roles
from services.contracts.tenant import prefix_of, scoped
from services.features.schema import WINDOW_MS, LogPosition, PopularWindow
from services.settings.settings import Settings
from services.stream import popularity
from services.stream.__main__ import ItemsToCount, _Listing
from services.stream.aggregate import LoggedEvent
from services.stream.popularity import LastTouches, ListedItems, PopularityCounter
from tests.support.training.bundles import publish_bundle
from tests.support.wait import wait_for

HOUR_MS = WINDOW_MS["1h"]
NOW_MS = 1_000 * HOUR_MS
NUM_PAIRS = 2**10
NAMES = ("ahead", "a", "b", "new", "now", "old")


def counter(*item_ids: str) -> PopularityCounter:
    return PopularityCounter(ListedItems(item_ids or NAMES), NUM_PAIRS)


def event(offset: int, item_id: str, age_ms: int = 0, *, topic: str = "t", user_id: str | None = None) -> LoggedEvent:
    """Return an event of a given age, from its own user unless `user_id` is given."""
    name = f"{topic}{offset}"
    return LoggedEvent(user_id or name, item_id, name, (NOW_MS - age_ms) * 1_000, LogPosition(topic, 0, offset))


def test_windows_slide_without_events() -> None:
    """Counts leave the 1h window first; an event 30 hours in the future counts once due, a dislike never."""
    counts = counter()
    for touch in (event(0, "ahead", -30 * HOUR_MS), event(1, "now"), replace(event(2, "a"), event_type="dislike")):
        counts.add(touch)

    tops = [counts.top(NOW_MS + hours * HOUR_MS, 10) for hours in (0, 2, 30, 32, 300)]

    assert [top["1h"].item_ids for top in tops] == [("now",), (), ("ahead",), (), ()]
    assert ["now" in top["24h"].item_ids for top in tops] == [True, True, False, False, False]
    assert ["now" in top["7d"].item_ids for top in tops] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("weights", "top"),
    [
        ("[types.buy]\nweight = 5", {"a": 6, "b": 5, "new": 1}),
        ("[types.view]\nrole = 'weak'\nweight = 0.4\n[types.buy]\nweight = 2.5", {"a": 3, "b": 2}),
        ("[types.buy]\nweight = 0", {"new": 1, "a": 2, "b": 1}),
    ],
)
def test_a_touch_counts_by_its_types_weight(weights: str, top: dict[str, int]) -> None:
    """A user's largest weight for an item counts once, in any order; types of weight 0 change nothing."""
    counts = PopularityCounter(ListedItems(NAMES), NUM_PAIRS, parse_event_roles(weights))
    touches = [
        ("u", "a", "view"),
        ("u", "a", "buy"),
        ("v", "a", "view"),
        ("u", "b", "buy"),
        ("u", "b", "view"),
        ("u", "new", "view"),
    ]
    for offset, (user_id, item_id, event_type) in enumerate(touches):
        counts.add(replace(event(offset, item_id, user_id=user_id), event_type=event_type))

    listed = counts.top(NOW_MS, 10)["1h"]

    assert {item_id: listed.counts[listed.item_ids.index(item_id)] for item_id in top} == top


def test_a_log_that_is_counted_after_sliding_keeps_no_past_buckets() -> None:
    """Counting a week's log after sliding gives the same windows within the memory of the windows' buckets."""
    names = [f"i{number}" for number in range(20_000)]
    week = [event(offset, names[offset], (2_016 - offset) * 300_000) for offset in range(2_016)]
    slid, late = counter(*names), counter(*names)
    slid.slide(NOW_MS)
    tracemalloc.start()
    for touch in week:
        slid.add(touch)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for touch in week:
        late.add(touch)

    assert slid.top(NOW_MS, 10) == late.top(NOW_MS, 10)
    assert num_bytes < 50 * 2 * len(names)


def test_a_replay_counts_nothing_twice() -> None:
    """Offsets and repeated deliveries count once; another user's event and a recreated topic's event count."""
    counts = counter()
    log = [event(0, "a"), event(1, "a"), event(2, "b", user_id="t1")]
    again = replace(event(3, "a"), user_id="t1")
    for touch in (*log, *log, again, event(0, "a", topic="again")):
        counts.add(touch)

    assert counts.top(NOW_MS, 10)["1h"] == PopularWindow(("a", "b"), (3, 1))


def test_a_bundle_changes_what_is_listed() -> None:
    """Counts of an item survive a bundle without it; a new item counts from its first bundle on."""
    items = ListedItems(("a", "b"))
    counts = PopularityCounter(items, NUM_PAIRS)
    shown = []
    for number, listed in enumerate((("a", "b"), ("b", "c"), ("a", "b", "c"))):
        items.replace(listed)
        for index, item_id in enumerate("abc"):
            counts.add(event(3 * number + index, item_id))
        shown.append(counts.top(NOW_MS, 10)["1h"])

    assert [dict(zip(row.item_ids, row.counts, strict=True)) for row in shown] == [
        {"a": 1, "b": 1},
        {"b": 2, "c": 1},
        {"a": 2, "b": 3, "c": 2},
    ]


def test_promoted_versions_are_listed(tmp_path: Path) -> None:
    """The worker follows the records of all names, also of a name that had no version when it started."""
    publish_bundle(tmp_path / "bundles", "v1", num_items=3)
    settings = Settings(state_dir=tmp_path, names="default,acme.default", bundle_poll_s=0.02)
    items = ListedItems()
    listing = _Listing(settings, ItemsToCount(items))
    listing.start()
    at_start = [len(items.of(tenant).current.item_ids) for tenant in ("", "acme")]
    BundleStore(tmp_path / "bundles", "acme.default").promote("v1")
    publish_bundle(tmp_path / "bundles", "v2", num_items=5)

    wait_for(lambda: [len(items.of(tenant).current.item_ids) for tenant in ("", "acme")] == [5, 3])
    listing.stop()
    assert at_start == [3, 0]


def test_a_deleted_tenant_s_items_are_popular_no_more() -> None:
    """The deletion of its whole catalogue ends the counts of its bundles' items, and of no other tenant's."""
    listed = ListedItems()
    counts, counted = PopularityCounter(listed, NUM_PAIRS), ItemsToCount(listed)
    for name in ("default", "acme.default", "bolt.default"):
        counted.replace(name, Serving("v1", loaded={"v1": ("a",)}))
    counted.list_now()
    for index, tenant in enumerate(("", "acme", "bolt")):
        counts.add(event(index, "a", user_id=scoped(tenant, "u")))
    before = counts.top(NOW_MS, 10)["1h"].item_ids
    counted.live_items.apply([(prefix_of("acme"), None)])
    counted.list_now()

    assert before == ("a", scoped("acme", "a"), scoped("bolt", "a"))
    assert counts.top(NOW_MS, 10)["1h"].item_ids == ("a", scoped("bolt", "a"))


def test_old_pairs_are_forgotten_first() -> None:
    """A table too small for all pairs keeps the newest pairs."""
    touches = LastTouches(NUM_PAIRS)
    for time_s in range(10 * NUM_PAIRS):
        assert touches.touch(f"u{time_s}", "i", time_s) is None

    known = [touches.touch(f"u{time_s}", "i", 0) == (time_s, 0) for time_s in range(10 * NUM_PAIRS)]

    assert all(known[-NUM_PAIRS // 8 :])
    assert not any(known[: 5 * NUM_PAIRS])


class WindowsAgainstSorting(RuleBasedStateMachine):
    """Oracle: keep each user's newest touch of each item, count touches within the window, and sort."""

    def __init__(self) -> None:
        super().__init__()
        self.item_ids = [f"i{number:02d}" for number in range(40)]
        self.items = ListedItems(self.item_ids)
        self.counts = PopularityCounter(self.items, 2**14)
        self.newest: dict[tuple[str, str], int] = defaultdict(int)
        self.now_ms, self.offset = NOW_MS, 0

    @rule(st_events=st.lists(st.tuples(st.integers(0, 49), st.integers(0, 5), st.integers(-600, 5_400)), max_size=60))
    def add(self, st_events: list[tuple[int, int, int]]) -> None:
        """Touch some items, late, now, or in the future, including unknown items."""
        for item, user, age_s in st_events:
            time_s = self.now_ms // 1_000 - age_s
            position = LogPosition("t", 0, self.offset)
            self.counts.add(LoggedEvent(f"u{user}", f"i{item:02d}", "e", time_s * 1_000_000, position))
            self.offset += 1
            if f"i{item:02d}" in self.items.current.number_of:
                pair = f"u{user}", f"i{item:02d}"
                self.newest[pair] = max(self.newest[pair], time_s)

    @rule(minutes=st.sampled_from([1, 5, 25, 90]))
    def wait(self, minutes: int) -> None:
        self.now_ms += minutes * 60_000

    @invariant()
    def top_is_the_sorted_count(self) -> None:
        """Every window's best items equal a plain count's, ties by item id."""
        for name, length_ms in WINDOW_MS.items():
            bucket_s = length_ms // 12_000
            now = self.now_ms // 1_000 // bucket_s
            plain: dict[str, int] = defaultdict(int)
            for (_, item_id), time_s in self.newest.items():
                if now - 12 <= time_s // bucket_s <= now:
                    plain[item_id] += 1
            ranked = sorted(plain.items(), key=lambda entry: (-entry[1], entry[0]))[:3]
            top = self.counts.top(self.now_ms, 3)[name]
            assert list(zip(top.item_ids, top.counts, strict=True)) == ranked


@pytest.fixture(autouse=True)
def few_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep so few leaders that they are often cut and chosen again."""
    monkeypatch.setattr(popularity, "_FEWEST_LEADERS", 6)
    monkeypatch.setattr(popularity, "_MOST_LEADERS", 9)


class TestWindows(WindowsAgainstSorting.TestCase):  # type: ignore[name-defined, misc]
    """Run the machine."""

    settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
