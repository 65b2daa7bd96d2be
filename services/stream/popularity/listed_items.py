"""The items that may be counted: those of the live catalogue, by number.

An item keeps its number while the process lives, so counts outlive a bundle; one that a later catalogue lacks is no longer listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """All items so far: `number_of` their ids, `is_listed` and `place` (n,) by number. Places follow the order of the ids, from 0."""

    number_of: dict[str, int]
    item_ids: tuple[str, ...]
    is_listed: np.ndarray
    place: np.ndarray


class ListedItems:
    """The listing of the live bundle; empty before the first. Replaced in one assignment, so that any thread may read it."""

    def __init__(self, item_ids: Sequence[str] = ()) -> None:
        self.current = Listing({}, (), np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64))
        self.replace(item_ids)

    def replace(self, item_ids: Sequence[str]) -> None:
        """List these items, and no others. Takes a second for a million: call it in a thread of its own."""
        before = self.current
        new = [item_id for item_id in item_ids if item_id not in before.number_of]
        every_id = (*before.item_ids, *new)
        number_of = {item_id: number for number, item_id in enumerate(every_id)}
        is_listed = np.zeros(len(every_id), dtype=bool)
        is_listed[[number_of[item_id] for item_id in item_ids]] = True
        place = np.empty(len(every_id), dtype=np.int64)
        place[sorted(range(len(every_id)), key=every_id.__getitem__)] = np.arange(len(every_id))
        self.current = Listing(number_of, every_id, is_listed, place)
