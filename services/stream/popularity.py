"""Popular items: the number of users per catalogue item within sliding windows, for one log partition.

    ListedItems        the items that may be counted: the live catalogue
    PopularityCounter  counts an event's touch in each window, and returns each window's best items
      LastTouches      when a user last touched an item
      _Window          twelve buckets by event time and their total
        _Leaders       the items with the highest totals

Pure: the time is an argument. A window reaches back its length plus at most one bucket. A user counts once per item and
window, at the time of the newest touch and with the largest weight, so a repeated delivery counts once. A bounded
number of (user, item) pairs is remembered; a forgotten pair counts again. Weights are counted in whole units: of 1, or
of a tenth if the rules have fractions. Items outside the catalogue are not counted. An event with a future time is
counted from that time on.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from services.contracts.event_roles import DEFAULT_ROLES, HISTORY_ROLES, EventRoles
from services.contracts.tenant import DEFAULT_TENANT, scoped, tenant_of
from services.features.schema import WINDOW_MS, LogPosition, PopularWindow
from services.stream.aggregate import LoggedEvent

_BUCKETS_PER_WINDOW = 12
_MOST_PER_BUCKET = 65_535
_WAYS = 4
_TIME_BITS, _KIND_BITS = 32, 4
_TIME_MASK, _KIND_MASK = (1 << _TIME_BITS) - 1, (1 << _KIND_BITS) - 1
_TENTHS = 10
_FEWEST_LEADERS, _MOST_LEADERS = 512, 2_048
"""The number of leaders after a selection, and before the next."""
_PLACE_BITS = 32
TENANT_ITEMS = 50
"""Maximum published items of a tenant's window: a row holds the windows of all tenants."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """All items so far: `number_of` maps ids to numbers, `is_listed` and `place` (n,) are by number.

    Places rank the ids, from 0.
    """

    number_of: dict[str, int]
    item_ids: tuple[str, ...]
    is_listed: np.ndarray
    place: np.ndarray


class ListedItems:
    """The listing of the live bundle; empty before the first.

    Replaced in one assignment, so that any thread may read it. An item keeps its number for the life of the process, so
    counts outlive a bundle; an item missing from a later catalogue is no longer listed.
    """

    def __init__(self, item_ids: Sequence[str] = ()) -> None:
        self.current = Listing({}, (), np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64))
        self._of_tenants: dict[str, ListedItems] = {}
        self.replace(item_ids)

    def of(self, tenant: str) -> "ListedItems":
        """Return the listing of a tenant's bundles: this object for the default tenant."""
        return self._of_tenants.setdefault(tenant, ListedItems()) if tenant else self

    def replace(self, item_ids: Sequence[str]) -> None:
        """Replace the listed items. Takes a second for a million: call it in its own thread."""
        before = self.current
        new = [item_id for item_id in item_ids if item_id not in before.number_of]
        every_id = (*before.item_ids, *new)
        number_of = {item_id: number for number, item_id in enumerate(every_id)}
        is_listed = np.zeros(len(every_id), dtype=bool)
        is_listed[[number_of[item_id] for item_id in item_ids]] = True
        place = np.empty(len(every_id), dtype=np.int64)
        place[sorted(range(len(every_id)), key=every_id.__getitem__)] = np.arange(len(every_id))
        self.current = Listing(number_of, every_id, is_listed, place)


class PopularityCounter:
    """Counts of one partition, by tenant. Owned by the worker that owns the partition.

    A window keeps four bytes per item, and each bucket with events two.
    """

    def __init__(
        self, items: ListedItems, num_remembered_pairs: int = 2**20, roles: EventRoles = DEFAULT_ROLES
    ) -> None:
        self._items = items
        self._roles = roles
        weights = _weights_of(roles)
        unit = 1 if all(weight == int(weight) for weight in weights) else _TENTHS
        self._units = sorted({round(weight * unit) for weight in weights})[-1 - _KIND_MASK :]
        """The weight of a touch by kind; beyond sixteen weights, the lowest count as the next higher."""
        self._unit = unit
        self._windows: dict[str, dict[str, _Window]] = {}
        self._touches = LastTouches(num_remembered_pairs)
        self._position: LogPosition | None = None
        self._slid_s = 0

    @property
    def position(self) -> LogPosition | None:
        """The last event that was counted or skipped; None before the first."""
        return self._position

    def add(self, event: LoggedEvent) -> None:
        """Count one event that histories hold of a listed item, once per offset. Call in log order."""
        if self._position is not None and self._position.covers(event.position):
            return
        self._position = event.position
        rule = self._roles.rule(event.event_type)
        role = rule.role_of(event.value)
        if role not in HISTORY_ROLES:
            return
        tenant = tenant_of(event.user_id)
        listing = self._items.of(tenant).current
        number = listing.number_of.get(event.item_id)
        if number is None or not listing.is_listed[number]:
            return
        time_s = event.event_time_us // 1_000_000
        kind = bisect_left(self._units, round(rule.count_of(role) * self._unit))
        before = self._touches.touch(event.user_id, event.item_id, time_s, kind)
        before_s, before_units = (None, 0) if before is None else (before[0], self._units[before[1]])
        for window in self._windows_of(tenant).values():
            window.touch(number, before_s, before_units, time_s, self._units[kind], listing)

    def slide(self, now_ms: int) -> None:
        """Drop the counts before the windows that end at `now_ms`.

        Call before a log is counted: otherwise its past takes a bucket for every five minutes.
        """
        self._slid_s = now_ms // 1_000
        for windows in self._windows.values():
            for window in windows.values():
                window.slide(self._slid_s)

    def top(self, now_ms: int, num_items: int) -> dict[str, PopularWindow]:
        """Slide to `now_ms` and return each window's most frequent items of each tenant, ties by item id.

        Of tenants other than the default, at most TENANT_ITEMS items each, with scoped ids.
        """
        self._slid_s = now_ms // 1_000
        leaders: dict[str, list[tuple[str, int]]] = {name: [] for name in WINDOW_MS}
        for tenant in sorted({DEFAULT_TENANT, *self._windows}):
            most, listing = min(num_items, TENANT_ITEMS) if tenant else num_items, self._items.of(tenant).current
            for name, window in self._windows_of(tenant).items():
                top = window.top(self._slid_s, most, listing)
                leaders[name] += zip((scoped(tenant, item_id) for item_id in top.item_ids), top.counts, strict=True)
        return {
            name: PopularWindow(tuple(item_id for item_id, _ in best), tuple(count for _, count in best))
            for name, best in leaders.items()
        }

    def _windows_of(self, tenant: str) -> dict[str, "_Window"]:
        windows = self._windows.get(tenant)
        if windows is None:
            windows = self._windows[tenant] = {
                name: _Window(length_ms // _BUCKETS_PER_WINDOW // 1_000, self._unit)
                for name, length_ms in WINDOW_MS.items()
            }
            for window in windows.values():
                window.slide(self._slid_s)
        return windows


class _Window:
    """The total sums the buckets from `_oldest` to `_newest`; later events wait in their bucket."""

    def __init__(self, bucket_s: int, unit: int) -> None:
        self._bucket_s = bucket_s
        self._unit = unit
        self._buckets: dict[int, np.ndarray] = {}
        self._total = np.zeros(0, dtype=np.int32)
        self._leaders = _Leaders()
        self._oldest = 0
        self._newest = -1

    def touch(
        self, number: int, before_s: int | None, before_units: int, time_s: int, units: int, listing: Listing
    ) -> None:
        """Replace the user's previous touch of this item; the larger of the two weights is kept."""
        bucket = time_s // self._bucket_s
        if before_s is not None:
            before = before_s // self._bucket_s
            if before >= bucket:
                if units > before_units:
                    self._change(number, before, units - before_units, listing)
                return
            self._change(number, before, -before_units, listing)
        self._change(number, bucket, max(units, before_units), listing)

    def _change(self, number: int, bucket: int, by: int, listing: Listing) -> None:
        if bucket < self._oldest:
            return
        counts = self._counts(bucket, len(listing.item_ids))
        changed = int(counts[number]) + by
        if not 0 <= changed <= _MOST_PER_BUCKET:  # below: the entry belonged to another pair
            return
        counts[number] = changed
        if bucket <= self._newest:
            self._total[number] += by
            if by > 0:
                self._leaders.rose(number, self._total, listing)

    def _counts(self, bucket: int, num_items: int) -> np.ndarray:
        """Return a bucket's counts, with room for this many items, like the total."""
        if len(self._total) < num_items:
            self._total = _extended(self._total, num_items)
        counts = self._buckets.get(bucket)
        if counts is None:
            counts = np.zeros(num_items, dtype=np.uint16)
        self._buckets[bucket] = counts = _extended(counts, num_items)
        return counts

    def top(self, now_s: int, num_items: int, listing: Listing) -> PopularWindow:
        self._total = _extended(self._total, len(listing.item_ids))
        self.slide(now_s)
        best = self._leaders.best(num_items, self._total, listing)
        return PopularWindow(
            tuple(listing.item_ids[number] for number in best),
            tuple(max(1, round(int(self._total[number]) / self._unit)) for number in best),
        )

    def slide(self, now_s: int) -> None:
        """Subtract the buckets before the window that ends now, and add the buckets that have begun."""
        now = now_s // self._bucket_s
        for bucket in [bucket for bucket in self._buckets if self._newest < bucket <= now]:
            counts = self._buckets[bucket]
            self._total[: len(counts)] += counts
            self._leaders.forget()
        self._newest = max(self._newest, now)
        self._oldest = max(self._oldest, now - _BUCKETS_PER_WINDOW)
        for bucket in [bucket for bucket in self._buckets if bucket < self._oldest]:
            counts = self._buckets.pop(bucket)
            self._total[: len(counts)] -= counts


class _Leaders:
    """The items with the highest totals of one window, updated as single totals rise, so that no call sorts all items.

    A *score* orders items: the total first, then the rank of the id, so no two are equal. The members are all listed
    items whose score reaches the floor. Rising totals keep that true one item at a time. Falling totals do not break
    it, but may leave too few members above the floor; then the members are chosen again over all items.
    """

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._floor: int | None = None
        """The lowest score of a member; None while every counted item is a member."""
        self._listing: Listing | None = None

    def forget(self) -> None:
        """Choose again at the next call of `best`: totals have risen without a call of `rose`."""
        self._listing = None

    def rose(self, number: int, total: np.ndarray, listing: Listing) -> None:
        """Add an item whose total has risen, if its score reaches the floor."""
        if number in self._members or listing is not self._listing:
            return
        if self._floor is None or (int(total[number]) << _PLACE_BITS) - int(listing.place[number]) >= self._floor:
            self._members.add(number)
            if len(self._members) > _MOST_LEADERS:
                self._raise_floor(total, listing)

    def best(self, num_items: int, total: np.ndarray, listing: Listing) -> list[int]:
        """Return the numbers of the best listed items whose total is above 0, best first."""
        members, scores = self._ranked(total, listing)
        if listing is not self._listing or not self._suffice(num_items, scores):
            self._listing = listing
            self._choose(max(_FEWEST_LEADERS, 2 * num_items), total, listing)
            members, _ = self._ranked(total, listing)
        best = members[:num_items]
        numbers: list[int] = best[total[best] > 0].tolist()
        return numbers

    def _suffice(self, num_items: int, scores: np.ndarray) -> bool:
        """Return whether an item outside the members may be among the best."""
        return self._floor is None or (len(scores) >= num_items and int(scores[num_items - 1]) >= self._floor)

    def _ranked(self, total: np.ndarray, listing: Listing) -> tuple[np.ndarray, np.ndarray]:
        """Return the members and their scores, best first."""
        members = np.fromiter(self._members, np.int64, len(self._members))
        scores = _scores(members, total, listing)
        order = np.argsort(-scores)
        return members[order], scores[order]

    def _raise_floor(self, total: np.ndarray, listing: Listing) -> None:
        members, scores = self._ranked(total, listing)
        floor = int(scores[_FEWEST_LEADERS - 1])
        self._members = set(members[:_FEWEST_LEADERS].tolist())
        self._floor = floor if self._floor is None else max(self._floor, floor)

    def _choose(self, num_members: int, total: np.ndarray, listing: Listing) -> None:
        """Choose the members over all items, trying first only the items whose total is near the floor or above."""
        near = 1 if self._floor is None else (self._floor >> _PLACE_BITS) * 7 // 8
        listed = total[: len(listing.is_listed)]
        for lowest in (max(1, near), 1):
            counted = np.flatnonzero((listed >= lowest) & listing.is_listed)
            if len(counted) >= num_members:
                break
        if len(counted) <= num_members:
            self._members, self._floor = set(counted.tolist()), None
            return
        scores = _scores(counted, total, listing)
        self._floor = int(np.partition(scores, -num_members)[-num_members])
        self._members = set(counted[scores >= self._floor].tolist())


class LastTouches:
    """Remembers the last time and the highest kind of touch of about `num_pairs` (user, item) pairs, a power of two.

    Forgets roughly the oldest touch first. One entry of eight bytes per pair. The pair's hash selects the bucket, and a
    part of the hash is stored in the entry: two pairs collide about once in sixty million.
    """

    def __init__(self, num_pairs: int) -> None:
        self._entries = array("Q", bytes(8 * num_pairs))
        self._mask = num_pairs - _WAYS

    def touch(self, user_id: str, item_id: str, time_s: int, kind: int = 0) -> tuple[int, int] | None:
        """Record a touch of this kind (0 to 15) at this time (Unix s).

        Return the latest time and the highest kind before this call; None for an unknown pair.
        """
        pair = int.from_bytes(blake2b(f"{user_id}\0{item_id}".encode(), digest_size=8).digest())
        mark = pair >> (_TIME_BITS + _KIND_BITS)
        first = pair & self._mask
        entries = self._entries
        oldest = first
        for slot in range(first, first + _WAYS):
            entry = entries[slot]
            if entry >> (_TIME_BITS + _KIND_BITS) == mark and entry:
                before_s, before_kind = entry & _TIME_MASK, entry >> _TIME_BITS & _KIND_MASK
                entries[slot] = _entry(mark, max(before_kind, kind), max(before_s, time_s))
                return before_s, before_kind
            if entry & _TIME_MASK < entries[oldest] & _TIME_MASK:
                oldest = slot
        entries[oldest] = _entry(mark, kind, time_s)
        return None


def _entry(mark: int, kind: int, time_s: int) -> int:
    return (mark << _KIND_BITS | kind) << _TIME_BITS | time_s


def _weights_of(roles: EventRoles) -> set[float]:
    """Return the possible weights of events under these rules."""
    rules = (*roles.rules.values(), roles.other)
    return {1.0} | {rule.count_of(role) for rule in rules for role in (rule.role, rule.below) if role in HISTORY_ROLES}


def _extended(counts: np.ndarray, num_items: int) -> np.ndarray:
    """Return the counts with room for this many items: the same array if it is large enough."""
    if len(counts) >= num_items:
        return counts
    return np.concatenate((counts, np.zeros(num_items - len(counts), dtype=counts.dtype)))


def _scores(numbers: np.ndarray, total: np.ndarray, listing: Listing) -> np.ndarray:
    scores: np.ndarray = (total[numbers].astype(np.int64) << _PLACE_BITS) - listing.place[numbers]
    return scores
