"""How often items were touched within sliding windows, for one log partition.

Pure: the time is an argument. Each window is a ring of twelve buckets by event time and their running total, so adding
and sliding cost the same however many events there are; a window reaches back its length plus at most one bucket. Offsets
that were counted are skipped, so a replay counts nothing twice, and so are the ids of a bounded number of recent events,
per user. An event with a time in the future is counted from that time on.
"""

from collections import Counter, OrderedDict

from services.features.schema import WINDOW_MS, LogPosition, PopularWindow
from services.stream.aggregate import LoggedEvent

_BUCKETS_PER_WINDOW = 12


class PopularityCounter:
    """Counts of one partition. Owned by the worker that owns the partition."""

    def __init__(self, max_event_ids: int = 20_000) -> None:
        self._windows = {name: _Window(length_ms // _BUCKETS_PER_WINDOW) for name, length_ms in WINDOW_MS.items()}
        self._recent_ids: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._max_event_ids = max_event_ids
        self._position: LogPosition | None = None

    def add(self, event: LoggedEvent) -> None:
        """Count one event, unless its offset or its user's event of this id was counted before. Call in log order."""
        if self._position is not None and self._position.covers(event.position):
            return
        self._position = event.position
        if (event.user_id, event.event_id) in self._recent_ids:
            return
        self._recent_ids[event.user_id, event.event_id] = None
        if len(self._recent_ids) > self._max_event_ids:
            self._recent_ids.popitem(last=False)
        for window in self._windows.values():
            window.add(event.item_id, event.event_time_us // 1_000)

    def top(self, now_ms: int, num_items: int) -> dict[str, PopularWindow]:
        """Slide to `now_ms` and return each window's most frequent items, ties by item id."""
        return {name: window.top(now_ms, num_items) for name, window in self._windows.items()}


class _Window:
    """The total sums the buckets from `_oldest` to `_newest`; later events wait in their bucket."""

    def __init__(self, bucket_ms: int) -> None:
        self._bucket_ms = bucket_ms
        self._buckets: dict[int, Counter[str]] = {}
        self._total: Counter[str] = Counter()
        self._oldest = 0
        self._newest = -1

    def add(self, item_id: str, time_ms: int) -> None:
        bucket = time_ms // self._bucket_ms
        if bucket >= self._oldest:
            self._buckets.setdefault(bucket, Counter())[item_id] += 1
        if self._oldest <= bucket <= self._newest:
            self._total[item_id] += 1

    def top(self, now_ms: int, num_items: int) -> PopularWindow:
        self._slide(now_ms // self._bucket_ms)
        ranked = sorted(self._total.items(), key=lambda entry: (-entry[1], entry[0]))[:num_items]
        return PopularWindow(tuple(item_id for item_id, _ in ranked), tuple(count for _, count in ranked))

    def _slide(self, now: int) -> None:
        for bucket in [bucket for bucket in self._buckets if self._newest < bucket <= now]:
            self._total.update(self._buckets[bucket])
        self._newest = max(self._newest, now)
        self._oldest = max(self._oldest, now - _BUCKETS_PER_WINDOW)
        for bucket in [bucket for bucket in self._buckets if bucket < self._oldest]:
            self._total -= self._buckets.pop(bucket)  # drops what falls to zero
