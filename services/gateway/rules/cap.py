"""Caps: at most n items of each value of an attribute, such as a category. Pinned items count.

Each place gets the first candidate that exceeds no cap; only where there is none, the first candidate at all.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence

from services.contracts.rules import Cap, Rules
from services.gateway.rules.slate import Known, Slate
from services.items.columns import ItemColumns


def cap(slate: Slate, order: Iterator[int], rules: Rules, known: Known) -> Iterator[int]:
    """Yield the candidates' places in the new order."""
    room, indices = Room(rules.caps or (), known.expressions.columns), slate.indices.tolist()
    for index in slate.pinned.values():
        room.take(room.keys(index))
    deferred = []
    for place in order:
        keys = room.keys(indices[place])
        if room.is_for(keys):
            room.take(keys)
            yield place
        else:
            deferred.append(place)
    yield from deferred


class Room:
    """How many items of each value still keep within the caps. A key is a cap's place and a value."""

    def __init__(self, caps: Sequence[Cap], columns: ItemColumns) -> None:
        self._caps = caps
        self._columns = columns
        self._left: dict[Hashable, int] = {}

    def keys(self, index: int) -> Sequence[tuple[int, Hashable]]:
        """Return the keys of an item."""
        return [
            (number, value)
            for number, one in enumerate(self._caps)
            for value in values_of(self._columns, one.attribute, index)
        ]

    def is_for(self, keys: Iterable[tuple[int, Hashable]]) -> bool:
        """Whether there is room for an item of these keys."""
        return all(self._left.get(key, 1) > 0 for key in keys)

    def take(self, keys: Iterable[tuple[int, Hashable]]) -> None:
        """Count an item."""
        for key in keys:
            self._left[key] = self._left.get(key, self._caps[key[0]].most) - 1


def values_of(columns: ItemColumns, attribute: str, index: int) -> tuple[Hashable, ...]:
    """Return the values that an item has under an attribute; none where it has none."""
    found: tuple[Hashable, ...] = ()
    if (texts := columns.texts.get(attribute)) is not None:
        found = texts.values[texts.codes[index]]
    if (numbers := columns.numbers.get(attribute)) is not None and (number := float(numbers.numbers[index])) == number:
        found = (*found, number)
    if (flags := columns.flags.get(attribute)) is not None and (state := int(flags.flags[index])) >= 0:
        found = (*found, ("flag", state))
    return found
