"""How many users touched each item of the catalogue within sliding windows, for one log partition.

Pure: the time is an argument. Each window is a ring of twelve buckets by event time and their total; a window reaches back its length plus at
most one bucket. A user counts once per item and window, at the time of the newest touch, so what is delivered twice counts once; `LastTouches`
remembers that for a bounded number of pairs, and a pair that it has forgotten counts once more. Items that the catalogue lacks are not
counted. An event with a time in the future is counted from that time on.
"""

import numpy as np

from services.contracts.event_roles import DEFAULT_ROLES, HISTORY_ROLES, EventRoles
from services.features.schema import WINDOW_MS, LogPosition, PopularWindow
from services.stream.aggregate import LoggedEvent
from services.stream.popularity.last_touches import LastTouches
from services.stream.popularity.leaders import Leaders
from services.stream.popularity.listed_items import ListedItems, Listing

_BUCKETS_PER_WINDOW = 12
_MOST_PER_BUCKET = 65_535


class PopularityCounter:
    """Counts of one partition. Owned by the worker that owns the partition.

    A window keeps four bytes per item, and each of its buckets that an event fell into two.
    """

    def __init__(
        self, items: ListedItems, num_remembered_pairs: int = 2**20, roles: EventRoles = DEFAULT_ROLES
    ) -> None:
        self._items = items
        self._roles = roles
        self._windows = {
            name: _Window(length_ms // _BUCKETS_PER_WINDOW // 1_000) for name, length_ms in WINDOW_MS.items()
        }
        self._touches = LastTouches(num_remembered_pairs)
        self._position: LogPosition | None = None

    @property
    def position(self) -> LogPosition | None:
        """The last event that was counted or skipped; None before the first."""
        return self._position

    def add(self, event: LoggedEvent) -> None:
        """Count one event of a listed item that histories hold, unless its offset was counted before. Call in log order."""
        if self._position is not None and self._position.covers(event.position):
            return
        self._position = event.position
        if self._roles.role(event.event_type, event.value) not in HISTORY_ROLES:
            return
        listing = self._items.current
        number = listing.number_of.get(event.item_id)
        if number is None or not listing.is_listed[number]:
            return
        time_s = event.event_time_us // 1_000_000
        before_s = self._touches.touch(event.user_id, event.item_id, time_s)
        for window in self._windows.values():
            window.touch(number, before_s, time_s, listing)

    def top(self, now_ms: int, num_items: int) -> dict[str, PopularWindow]:
        """Slide to `now_ms` and return each window's most frequent items, ties by item id."""
        listing = self._items.current
        return {name: window.top(now_ms // 1_000, num_items, listing) for name, window in self._windows.items()}


class _Window:
    """The total sums the buckets from `_oldest` to `_newest`; later events wait in their bucket."""

    def __init__(self, bucket_s: int) -> None:
        self._bucket_s = bucket_s
        self._buckets: dict[int, np.ndarray] = {}
        self._total = np.zeros(0, dtype=np.int32)
        self._leaders = Leaders()
        self._oldest = 0
        self._newest = -1

    def touch(self, number: int, before_s: int | None, time_s: int, listing: Listing) -> None:
        """Count a user's touch of an item instead of the same user's touch before."""
        bucket = time_s // self._bucket_s
        if before_s is not None:
            before = before_s // self._bucket_s
            if before >= bucket:
                return
            self._change(number, before, -1, listing)
        self._change(number, bucket, 1, listing)

    def _change(self, number: int, bucket: int, by: int, listing: Listing) -> None:
        if bucket < self._oldest:
            return
        counts = self._counts(bucket, len(listing.item_ids))
        changed = int(counts[number]) + by
        if not 0 <= changed <= _MOST_PER_BUCKET:  # below: another pair was taken for this one
            return
        counts[number] = changed
        if bucket <= self._newest:
            self._total[number] += by
            if by > 0:
                self._leaders.rose(number, self._total, listing)

    def _counts(self, bucket: int, num_items: int) -> np.ndarray:
        """Return a bucket's counts, with room for this many items, as the total then has."""
        if len(self._total) < num_items:
            self._total = _extended(self._total, num_items)
        counts = self._buckets.get(bucket)
        if counts is None:
            counts = np.zeros(num_items, dtype=np.uint16)
        self._buckets[bucket] = counts = _extended(counts, num_items)
        return counts

    def top(self, now_s: int, num_items: int, listing: Listing) -> PopularWindow:
        self._total = _extended(self._total, len(listing.item_ids))
        self._slide(now_s // self._bucket_s)
        best = self._leaders.best(num_items, self._total, listing)
        return PopularWindow(
            tuple(listing.item_ids[number] for number in best), tuple(int(self._total[number]) for number in best)
        )

    def _slide(self, now: int) -> None:
        for bucket in [bucket for bucket in self._buckets if self._newest < bucket <= now]:
            counts = self._buckets[bucket]
            self._total[: len(counts)] += counts
            self._leaders.forget()
        self._newest = max(self._newest, now)
        self._oldest = max(self._oldest, now - _BUCKETS_PER_WINDOW)
        for bucket in [bucket for bucket in self._buckets if bucket < self._oldest]:
            counts = self._buckets.pop(bucket)
            self._total[: len(counts)] -= counts


def _extended(counts: np.ndarray, num_items: int) -> np.ndarray:
    """Return the counts with room for this many items: the same array if it has."""
    if len(counts) >= num_items:
        return counts
    return np.concatenate((counts, np.zeros(num_items - len(counts), dtype=counts.dtype)))
