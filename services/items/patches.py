"""Applies the records of the topic `items` in log order, also a `PATCH` that another change has overtaken.

A `PATCH` writes the item's whole merged state, since compaction keeps one record per item. Its header says which fields
it changes, and how far its sender had read. If a reader has seen another change of the item since there, the whole
state lacks that change: the reader merges the fields into the state that it knows. Such an item is `unsettled`: its
last record differs from its state. The sender then states the item again, as a patch without changes, before compaction
could remove the change in between.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from services.contracts.items import ItemPatch, ItemState, decode_item
from services.items.live_items import Change

PATCH_HEADER = "patch"
SETTLE_ROUNDS = 8
"""How often a sender states an unsettled item again."""
_NUM_RECENT = 30_000
"""More records than a partition gets between a patch's read and its record."""


class PatchReader(Protocol):
    """The reader of the topic that a sender of patches needs."""

    def patch_of(self, changes: Mapping[str, Any]) -> ItemPatch:
        """Return the header of a patch of the states that are known now."""
        ...

    def is_unsettled(self, item_id: str) -> bool:
        """Return whether an item's last record is not its state, by its scoped id."""
        ...


class PatchMerger:
    """Decides the change that each record makes. Used by one reader, from one thread."""

    def __init__(self) -> None:
        self._topic_id = ""
        self._known_until: Mapping[int, int] = {}
        self._recent: dict[str, int] = {}
        self.unsettled: set[str] = set()
        """Items whose last record is not their state, by scoped id."""

    def begin(self, topic_id: str, positions: Mapping[int, int]) -> None:
        """Continue at these offsets by partition: all earlier records are in the known states."""
        self._topic_id, self._known_until = topic_id, dict(positions)
        self._recent.clear()

    def change(self, record: Any, state_of: Callable[[str], ItemState | None]) -> Change:
        """Return a record's change. Raises InvalidRequest.

        `state_of` returns an item's state before the record by its scoped id, None if it is deleted.
        """
        item_id, stated = decode_item(record.key, record.value)
        patch = next((ItemPatch.decode(value) for name, value in record.headers if name == PATCH_HEADER), None)
        is_overtaken = patch is not None and self._is_overtaken(item_id, record.partition, patch)
        self._remember(item_id, record.offset)
        if patch is None or not is_overtaken:
            self.unsettled.discard(item_id)
            return item_id, stated
        self.unsettled.add(item_id)
        known = state_of(item_id)
        merged = None if known is None else known.patched(patch.changes)
        if merged == stated:
            self.unsettled.discard(item_id)
        return item_id, merged

    def _remember(self, item_id: str, offset: int) -> None:
        self._recent.pop(item_id, None)
        self._recent[item_id] = offset
        if len(self._recent) > _NUM_RECENT:
            del self._recent[next(iter(self._recent))]

    def _is_overtaken(self, item_id: str, partition: int, patch: ItemPatch) -> bool:
        """Return whether the item has changed since the patch's sender read its state."""
        read_until = patch.read_until.get(partition)
        if read_until is None or patch.topic_id != self._topic_id:
            return False
        return self._known_until.get(partition, 0) > read_until or self._recent.get(item_id, -1) >= read_until
