"""The items that imports of one source have delivered, and how they compare with the source and the live catalogue.

    <folder>/delivered-<name>.json    ids, and the id of the topic that has them

An item that has left the source stays live until it is deleted. The embedded broker forgets its topics when it ends:
an item that neither the new topic nor the snapshot has is lost, and is sent again. An item that they have keeps its
state, which may be newer than the source.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from models.files import write_durably
from services.items.live_items import LiveItems


@dataclass(frozen=True, slots=True)
class LiveCatalogue:
    """The whole live catalogue, and the id of the topic that it was read from."""

    items: LiveItems
    topic_id: str

    def live(self, item_ids: Iterable[str]) -> list[str]:
        """Return which of these items have a state and are not deleted."""
        return self.items.read(lambda layout: [item_id for item_id in item_ids if layout.state(item_id) is not None])

    def lacks(self, item_ids: Iterable[str]) -> set[str]:
        """Return which of these items have no state; a deletion is a state."""
        stated = self.items.read(lambda layout: {item_id for _, item_id in layout.stated()})
        return {*item_ids} - stated


@dataclass(frozen=True, slots=True)
class Delivered:
    """The delivered items of a source."""

    item_ids: frozenset[str] = frozenset()
    topic_id: str = ""

    @classmethod
    def read(cls, path: Path) -> "Delivered":
        """Return the recorded items; none if the file is missing or damaged."""
        try:
            record = json.loads(path.read_text())
            return cls(frozenset(record["item_ids"]), str(record["topic_id"]))
        except (OSError, ValueError, TypeError, KeyError):
            return cls()

    def write(self, path: Path) -> None:
        """Replace or create the file atomically."""
        write_durably(path, json.dumps({"topic_id": self.topic_id, "item_ids": sorted(self.item_ids)}).encode())

    def missing(self, item_ids: Iterable[str], catalogue: LiveCatalogue) -> list[str]:
        """Return the live items that have left the source, in order."""
        return catalogue.live(sorted(self.item_ids.difference(item_ids)))

    def lost(self, catalogue: LiveCatalogue) -> set[str]:
        """Return the items that were lost with their topic."""
        return set() if self.topic_id == catalogue.topic_id else catalogue.lacks(self.item_ids)
