"""Caps: at most n items of each value of an attribute, such as a category. Pinned items count.

Each place gets the first candidate that exceeds no cap; only where there is none, the first candidate at all.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from services.contracts.rules import Cap, Rules
from services.gateway.rules.slate import Known, Slate
from services.items.columns import ItemColumns


def cap(slate: Slate, rules: Rules, known: Known) -> Slate:
    """Reorder the candidates."""
    columns, room = known.expressions.columns, Room(rules.caps or ())
    pinned = np.fromiter(slate.pinned.values(), dtype=np.int64, count=len(slate.pinned))
    for keys in room.keys(columns, pinned):
        room.take(keys)
    taken: list[int] = []
    deferred: list[int] = []
    for place, keys in enumerate(room.keys(columns, slate.indices)):
        if len(taken) == slate.num_free:
            break
        if room.is_for(keys):
            room.take(keys)
            taken.append(place)
        else:
            deferred.append(place)
    rest = np.arange(len(taken) + len(deferred), len(slate.indices))
    return slate.reordered(np.concatenate((np.array(taken + deferred, dtype=np.int64), rest)))


class Room:
    """How many items of each value still keep within the caps. A key is a cap's place and a value."""

    _NUM_AT_ONCE = 32
    """Keys are made for so many items in one step: most lists are full before the second."""

    def __init__(self, caps: Sequence[Cap]) -> None:
        self._caps = caps
        self._left: dict[Hashable, int] = {}

    def keys(self, columns: ItemColumns, indices: np.ndarray) -> Iterator[Sequence[tuple[int, Hashable]]]:
        """Yield the keys of each item."""
        for first in range(0, len(indices), self._NUM_AT_ONCE):
            some = indices[first : first + self._NUM_AT_ONCE]
            by_cap = [values_of(columns, one.attribute, some) for one in self._caps]
            for of_item in zip(*by_cap, strict=True):
                yield [(number, value) for number, values in enumerate(of_item) for value in values]

    def is_for(self, keys: Iterable[tuple[int, Hashable]]) -> bool:
        """Whether there is room for an item of these keys."""
        left = self._left
        for key in keys:  # noqa: SIM110 - a loop, since this is asked 200 times a request
            if left.get(key, 1) <= 0:
                return False
        return True

    def take(self, keys: Iterable[tuple[int, Hashable]]) -> None:
        """Count an item."""
        for key in keys:
            self._left[key] = self._left.get(key, self._caps[key[0]].most) - 1


def values_of(columns: ItemColumns, attribute: str, indices: np.ndarray) -> Sequence[tuple[Hashable, ...]]:
    """Return the values that these items have under an attribute; none where they have none."""
    found: list[tuple[Hashable, ...]] = [()] * len(indices)
    if (texts := columns.texts.get(attribute)) is not None:
        found = [texts.values[code] for code in texts.codes[indices].tolist()]
    if (numbers := columns.numbers.get(attribute)) is not None:
        held = numbers.numbers[indices].tolist()
        found = [(*one, number) if number == number else one for one, number in zip(found, held, strict=True)]
    if (flags := columns.flags.get(attribute)) is not None:
        states = flags.flags[indices].tolist()
        found = [(*one, ("flag", state)) if state >= 0 else one for one, state in zip(found, states, strict=True)]
    return found
