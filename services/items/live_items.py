"""The live catalogue of one process: the states of all items, laid out over the index of each bundle that requests use.

Each tenant has a catalogue of its own, reached by `LiveItems.of`; records of the topic are applied through the default
tenant's, which passes them on.

A bundle's layout is made before its swap from the newest layout, and every change is then applied to all layouts still
in use. Layouts of the popular items of names that are not loaded get the changes of their own items only: there may be
hundreds of them. Separate threads apply changes by record and by time; requests read without a lock.
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import TypeVar

from models.catalogue import Catalogue
from services.contracts.items import ItemState
from services.contracts.tenant import local, tenant_of
from services.items.layout import DELETED, NO_CATALOGUE, ItemLayout

T = TypeVar("T")

_NUM_AT_ONCE = 100
"""Changes that are applied to all layouts before another thread may use them."""
_MANY = 8
"""From this number of changes, columns are computed in one layout and copied to the remaining layouts."""

Change = tuple[str, ItemState | None]
"""An item's id, scoped to its tenant, and its new state; None: it is deleted, or the tenant's whole catalogue is."""


class Knowledge(IntEnum):
    """How current a process's item states are, as the metric's value."""

    CURRENT = 0
    """All records that the topic held at some time since the process started."""
    SNAPSHOT = 1
    """The snapshot's states; changes since it was written may be missing."""
    NONE = 2
    """Nothing: hidden items are unknown."""


class LiveItems:
    """Owns the layouts. `layout` is the newest; earlier layouts are kept up to date while they are referenced."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self.layout = ItemLayout(NO_CATALOGUE)
        self._in_use: weakref.WeakSet[ItemLayout] = weakref.WeakSet([self.layout])
        self._closed: weakref.WeakSet[ItemLayout] = weakref.WeakSet()
        """Layouts that take no new items."""
        self._next_time_ms = 0.0
        self._knowledge = Knowledge.CURRENT
        self._root = self
        self._tenants: dict[str, LiveItems] = {}
        self._dropped: set[str] = set()

    @property
    def knowledge(self) -> Knowledge:
        """Set by the topic's reader, for all tenants; without a topic the bundles' knowledge is complete."""
        return self._root._knowledge

    @knowledge.setter
    def knowledge(self, knowledge: Knowledge) -> None:
        self._root._knowledge = knowledge

    def of(self, tenant: str) -> "LiveItems":
        """Return a tenant's catalogue; this catalogue for the default tenant."""
        if not tenant:
            return self
        with self._lock:
            if tenant not in self._tenants:
                self._tenants[tenant] = LiveItems(self._wall_clock)
                self._tenants[tenant]._root = self
            return self._tenants[tenant]

    @property
    def tenants(self) -> Mapping[str, "LiveItems"]:
        """The catalogues of the other tenants so far."""
        with self._lock:
            return dict(self._tenants)

    @property
    def dropped(self) -> frozenset[str]:
        """The tenants whose whole catalogue was deleted."""
        with self._lock:
            return frozenset(self._dropped)

    def lay(self, catalogue: Catalogue) -> ItemLayout:
        """Return a layout over this catalogue with all states so far; later changes apply to it too.

        Takes a second for a million items.
        """
        with self._lock:
            self.layout = self.layout.relaid(catalogue, self._now_ms())
            self._in_use.add(self.layout)
            return self.layout

    def lay_closed(self, catalogue: Catalogue) -> ItemLayout:
        """Return a layout as `lay` does, but of this catalogue's items only, which is cheap for a small catalogue."""
        with self._lock:
            return self._lay_closed(catalogue)

    def lay_at_once(self, catalogue: Catalogue) -> ItemLayout | None:
        """Return a layout as `lay_closed` does, unless another thread uses the layouts."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._lay_closed(catalogue)
        finally:
            self._lock.release()

    def _lay_closed(self, catalogue: Catalogue) -> ItemLayout:
        layout = self.layout.relaid(catalogue, self._now_ms(), has_new=False)
        self._closed.add(layout)
        return layout

    def apply(self, changes: Iterable[Change]) -> int:
        """Apply changes in order; return the number of attributes dropped for lack of room."""
        own, of_tenants = [], defaultdict[str, list[Change]](list)
        for item_id, state in changes:
            if not (tenant := tenant_of(item_id)):
                own.append((item_id, state))
            elif not local(item_id):
                self._drop(tenant)
                of_tenants.pop(tenant, None)
            elif tenant not in self._dropped:
                of_tenants[tenant].append((local(item_id), state))
        others = [self.of(tenant)._apply(states) for tenant, states in of_tenants.items()]
        return self._apply(own) + sum(others)

    def _drop(self, tenant: str) -> None:
        """Forget a deleted tenant's catalogue; deletions of its items may still follow in other partitions."""
        with self._lock:
            self._tenants.pop(tenant, None)
            self._dropped.add(tenant)

    def _apply(self, changes: Sequence[Change]) -> int:
        """Apply changes of this catalogue's items, by their local ids."""
        num_left_out = 0
        for first in range(0, len(changes), _NUM_AT_ONCE):
            num_left_out += self._apply_some(changes[first : first + _NUM_AT_ONCE])
        return num_left_out

    def _apply_some(self, changes: Sequence[Change]) -> int:
        now_ms = self._now_ms()
        changed = dict.fromkeys(item_id for item_id, _ in changes)
        with self._lock:
            num_left_out = sum(self.layout.put(item_id, state, now_ms) for item_id, state in changes)
            for layout in self._in_use:
                if layout is not self.layout and len(changes) >= _MANY:
                    layout.copy(self.layout, list(changed))
                elif layout is not self.layout:
                    for item_id, state in changes:
                        layout.put(item_id, state, now_ms)
            for layout in self._closed:
                if own := layout.catalogue.index_of.keys() & changed.keys():
                    for item_id, state in changes:
                        if item_id in own:
                            layout.put(item_id, state, now_ms)
            for _, state in changes:
                if state is not None:
                    for time_ms in (state.published_ms, state.expires_ms):
                        if time_ms is not None and now_ms < time_ms < self._next_time_ms:
                            self._next_time_ms = time_ms
        return num_left_out

    def fill(self, fill: Callable[[ItemLayout], object]) -> None:
        """Have `fill` write many states into each layout at once, then apply the items' times."""
        now_ms = self._now_ms()
        with self._lock:
            for layout in self._all():
                fill(layout)
                layout.act(now_ms)
            self._next_time_ms = self.layout.next_time_ms(now_ms)

    @property
    def has_states(self) -> bool:
        """Whether an item of any tenant has a state."""
        return any(bool(items.layout.status.any()) for items in (self, *self.tenants.values()))

    def read(self, read: Callable[[ItemLayout], T]) -> T:
        """Return the result of `read` on the newest layout, which does not change meanwhile."""
        with self._lock:
            return read(self.layout)

    def find(self, read: Callable[[ItemLayout], T | None]) -> T | None:
        """Return the result of `read` on the newest layout, or else on other layouts, which may have other items."""
        with self._lock:
            results = (read(layout) for layout in (self.layout, *self._all()))
            return next((result for result in results if result is not None), None)

    def is_deleted(self, item_id: str) -> bool:
        """Return whether one of this catalogue's items is stated to be deleted."""
        with self._lock:
            index = self.layout.index(item_id)
            return index is not None and bool(self.layout.status[index] & DELETED)

    def stated(self, item_id: str) -> ItemState | None:
        """Return an item's state by its scoped id: None if it is deleted, empty if it is unknown."""
        if tenant := tenant_of(item_id):
            return self.of(tenant).stated(local(item_id))
        state = self.find(lambda layout: layout.state(item_id))
        return state if state is not None or self.is_deleted(item_id) else ItemState(item_id=item_id)

    def hides(self, item_id: str) -> bool:
        """Return whether an item, by its scoped id, may not be shown now by its state, its times included."""
        if tenant := tenant_of(item_id):
            return self.of(tenant).hides(local(item_id))
        with self._lock:
            index = self.layout.index(item_id)
            return index is not None and bool(self.layout.status[index]) and not self.layout.columns.available[index]

    def act_on_time(self) -> None:
        """Show items published and hide items expired since the last call. Costs nothing while no item is due."""
        for tenant in self.tenants.values():
            tenant.act_on_time()
        now_ms = self._now_ms()
        if now_ms < self._next_time_ms:
            return
        with self._lock:
            for layout in self._all():
                layout.act(now_ms)
            self._next_time_ms = self.layout.next_time_ms(now_ms)

    def _all(self) -> Iterator[ItemLayout]:
        return chain(self._in_use, self._closed)

    def until_next_s(self) -> float:
        """Return the seconds until the next item is due; infinite without such an item."""
        return max(0.0, (self._next_time_ms - self._now_ms()) / 1_000)

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1_000)
