"""The items that imports of one source have delivered, and how they compare with the source and the live catalogue.

    <folder>/delivered-<name>.json    hash of each item's row, the table's columns, and the id of the items' topic

A row that is as it was delivered is not sent again, and a sent row changes only the fields of the table's columns: the
item may have been changed since, or be changed meanwhile. An item that has left the source stays live until it is
deleted. The embedded broker forgets its topics when it ends: an item that neither the new topic nor the snapshot has is
lost, and is sent again. An item that they have keeps its state, which may be newer than the source.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from models.files import write_durably
from services.contracts.items import ItemPatch, ItemState
from services.errors import InvalidRequest
from services.items.live_items import LiveItems
from services.items.patches import PATCH_HEADER, SETTLE_ROUNDS, PatchReader

Record = tuple[bytes, bytes | None, *tuple[tuple[str, bytes], ...]]
"""Key, value and headers; without a value the record deletes an item."""
Send = Callable[[Sequence[Record]], None]
_STALL_S = 60.0


class CatalogueReader(PatchReader, Protocol):
    """What an import asks of its reader of the topic."""

    def read_to_end(self, stall_s: float) -> None:
        """Return when the topic has been read to its current end.

        Raises DependencyUnavailable if no record is read for `stall_s`.
        """
        ...


@dataclass(frozen=True, slots=True)
class LiveCatalogue:
    """The whole live catalogue, the id of its topic when it was read first, and the reader that keeps it current."""

    items: LiveItems
    topic_id: str
    reader: CatalogueReader

    def records(self, changes: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Record]:
        """Return the records of merge patches by item; a deleted item begins again."""
        patch = self.reader.patch_of({})  # before the states are read
        return [
            (item_id.encode(), self._merged(item_id, own).encode(), _header(patch, own)) for item_id, own in changes
        ]

    def _merged(self, item_id: str, changes: Mapping[str, Any]) -> ItemState:
        state = self.items.stated(item_id) or ItemState(item_id=item_id)
        try:
            return state.patched(changes)
        except InvalidRequest:  # the table's and the other attributes together are too many
            return msgspec.structs.replace(state, attributes={}).patched(changes)

    def settle(self, item_ids: Iterable[str], send: Send) -> None:
        """State these items again if their last record is not their state, as after a change during the import.

        Raises DependencyUnavailable.
        """
        left = list(item_ids)
        for _ in range(SETTLE_ROUNDS):
            self.reader.read_to_end(_STALL_S)
            header = _header(self.reader.patch_of({}), {})
            left = [item_id for item_id in left if self.reader.is_unsettled(item_id)]
            if not left:
                return
            states = ((item_id, self.items.stated(item_id)) for item_id in left)
            send([(item_id.encode(), None if state is None else state.encode(), header) for item_id, state in states])

    def live(self, item_ids: Iterable[str]) -> list[str]:
        """Return which of these items have a state and are not deleted."""
        return self.items.read(lambda layout: [item_id for item_id in item_ids if layout.state(item_id) is not None])

    def lacks(self, item_ids: Iterable[str]) -> set[str]:
        """Return which of these items have no state; a deletion is a state."""
        stated = self.items.read(lambda layout: {item_id for _, item_id in layout.stated()})
        return {*item_ids} - stated


@dataclass(frozen=True, slots=True)
class Delivered:
    """The hash of each delivered item's row; None until an import that sends the row has ended."""

    hashes: Mapping[str, int | None] = field(default_factory=dict)
    columns: frozenset[str] = frozenset()
    topic_id: str = ""

    @classmethod
    def read(cls, path: Path) -> "Delivered":
        """Return the recorded items; none if the file is missing or damaged."""
        try:
            record = json.loads(path.read_text())
            return cls(dict(record["hashes"]), frozenset(record["columns"]), str(record["topic_id"]))
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def write(self, path: Path) -> None:
        """Replace or create the file atomically."""
        record = {"topic_id": self.topic_id, "columns": sorted(self.columns), "hashes": dict(self.hashes)}
        write_durably(path, json.dumps(record).encode())

    def missing(self, item_ids: Iterable[str], catalogue: LiveCatalogue) -> list[str]:
        """Return the live items that have left the source, in order."""
        return catalogue.live(sorted(self.hashes.keys() - {*item_ids}))

    def lost(self, catalogue: LiveCatalogue) -> set[str]:
        """Return the items that were lost with their topic."""
        return set() if self.topic_id == catalogue.topic_id else catalogue.lacks(self.hashes)


def _header(patch: ItemPatch, changes: Mapping[str, Any]) -> tuple[str, bytes]:
    return PATCH_HEADER, msgspec.structs.replace(patch, changes=dict(changes)).encode()
