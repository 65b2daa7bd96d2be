"""Caps: at most n items per value of an attribute, such as a category. Pinned items count.

Each position gets the first candidate within all caps, or the first remaining candidate if every candidate exceeds a
cap.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from services.contracts.rules import Cap, Rules
from services.gateway.rules.slate import Known, Slate
from services.items.columns import ItemColumns


def cap(slate: Slate, order: Iterator[int], rules: Rules, known: Known) -> Iterator[int]:
    """Yield the candidates' ranks in the new order."""
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
    """Remaining items of each value within the caps. A key is a cap's index and a value."""

    def __init__(self, caps: Sequence[Cap], columns: ItemColumns) -> None:
        self._caps = caps
        self._values_of = [values_by(columns, one.attribute) for one in caps]
        self._left: dict[tuple[int, Hashable], int] = {}

    def keys(self, index: int) -> Sequence[tuple[int, Hashable]]:
        return [(number, value) for number, values_of in enumerate(self._values_of) for value in values_of(index)]

    def is_for(self, keys: Iterable[tuple[int, Hashable]]) -> bool:
        """Whether an item with these keys stays within the caps."""
        left = self._left
        return all(left.get(key, 1) > 0 for key in keys)

    def take(self, keys: Iterable[tuple[int, Hashable]]) -> None:
        for key in keys:
            self._left[key] = self._left.get(key, self._caps[key[0]].most) - 1


def values_by(columns: ItemColumns, attribute: str) -> Callable[[int], tuple[Hashable, ...]]:
    """Return a function from an item's index to its values of an attribute; empty if it has none."""
    texts, numbers, flags = columns.texts.get(attribute), columns.numbers.get(attribute), columns.flags.get(attribute)
    if texts is not None and numbers is None and flags is None:
        return lambda index: texts.values[texts.codes[index]]

    def values_of(index: int) -> tuple[Hashable, ...]:
        found: tuple[Hashable, ...] = () if texts is None else texts.values[texts.codes[index]]
        if numbers is not None and (number := float(numbers.numbers[index])) == number:
            found = (*found, number)
        if flags is not None and (state := int(flags.flags[index])) >= 0:
            found = (*found, ("flag", state))
        return found

    return values_of
