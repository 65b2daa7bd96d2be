"""A topic of items with one partition, and its reader, in memory."""

from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from pipelines.imports.delivered import LiveCatalogue
from services.contracts.items import ItemPatch, ItemState
from services.errors import InvalidRequest
from services.items.live_items import LiveItems
from services.items.patches import PATCH_HEADER, PatchMerger


class ItemTopic:
    """The records, and the item states from the records that are read so far."""

    def __init__(self, topic_id: str = "t1") -> None:
        self.topic_id = topic_id
        self.live = LiveItems()
        self.log: list[SimpleNamespace] = []
        self._num_read, self._merger = 0, PatchMerger()
        self._merger.begin(topic_id, {0: 0})

    @property
    def catalogue(self) -> LiveCatalogue:
        """The catalogue as an import follows it."""
        return LiveCatalogue(self.live, self.topic_id, self)

    def record(self, key: bytes, value: bytes | None, *headers: tuple[str, bytes]) -> None:
        """Write a record."""
        self.log.append(SimpleNamespace(key=key, value=value, headers=headers, partition=0, offset=len(self.log)))

    def patch(self, item_id: str, **changes: Any) -> None:
        """Write a change of an item's fields, as a gateway that has read all records."""
        header = ItemPatch(changes, self.topic_id, {0: len(self.log)}).encode()
        state = self.live.stated(item_id) or ItemState(item_id=item_id)
        self.record(item_id.encode(), state.patched(changes).encode(), (PATCH_HEADER, header))

    def read(self) -> None:
        """Apply the records."""
        for record in self.log[self._num_read :]:
            with suppress(InvalidRequest):
                self.live.apply([self._merger.change(record, self.live.stated)])
        self._num_read = len(self.log)

    def read_to_end(self, stall_s: float) -> None:
        """Apply the records."""
        self.read()

    def patch_of(self, changes: Mapping[str, Any]) -> ItemPatch:
        """Return the header of a patch of the states that are known now."""
        return ItemPatch(dict(changes), self.topic_id, {0: self._num_read})

    def is_unsettled(self, item_id: str) -> bool:
        """Return whether an item's last record is not its state."""
        return item_id in self._merger.unsettled
