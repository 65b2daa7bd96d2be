"""Caps: at most n items per value of an attribute, such as a category. Pinned items count.

Each position gets the first candidate within all caps, or the first remaining candidate if every candidate exceeds a
cap.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence

from services.contracts.rules import Cap, Rules
from services.gateway.rules.slate import Known, Slate
from services.items.columns import ItemColumns


def cap(slate: Slate, order: Iterator[int], rules: Rules, known: Known) -> Iterator[int]:
    """Yield the candidates' ranks in the new order."""
    room, index_of = Room(rules.caps or (), known.expressions.columns), slate.indices.item
    for index in slate.pinned.values():
        room.take(index)
    deferred = []
    for rank in order:
        if room.takes(index_of(rank)):
            yield rank
        else:
            deferred.append(rank)
    yield from deferred


class Room:
    """Remaining items of each value within the caps."""

    def __init__(self, caps: Sequence[Cap], columns: ItemColumns) -> None:
        self._caps: list[tuple[Callable[[int], tuple[Hashable, ...]], int, dict[Hashable, int]]]
        self._caps = [(values_by(columns, limit.attribute), limit.most, {}) for limit in caps]

    def is_for(self, index: int) -> bool:
        """Whether an item stays within the caps."""
        for values_of, most, left in self._caps:
            for value in values_of(index):
                if left.get(value, most) <= 0:
                    return False
        return True

    def take(self, index: int) -> None:
        for values_of, most, left in self._caps:
            for value in values_of(index):
                left[value] = left.get(value, most) - 1

    def takes(self, index: int) -> bool:
        """Take an item if it stays within the caps, and return whether it does."""
        taken: list[tuple[dict[Hashable, int], Hashable, int]] = []
        for values_of, most, left in self._caps:
            for value in values_of(index):
                if left.get(value, most) <= 0:
                    return False
                taken.append((left, value, most))
        for left, value, most in taken:
            left[value] = left.get(value, most) - 1
        return True


def values_by(columns: ItemColumns, attribute: str) -> Callable[[int], tuple[Hashable, ...]]:
    """Return a function from an item's index to its values of an attribute; empty if it has none."""
    texts, numbers, flags = columns.texts.get(attribute), columns.numbers.get(attribute), columns.flags.get(attribute)
    if texts is not None and numbers is None and flags is None:
        return lambda index: texts.values[texts.codes[index]]

    def values_of(index: int) -> tuple[Hashable, ...]:
        values: tuple[Hashable, ...] = () if texts is None else texts.values[texts.codes[index]]
        if numbers is not None and (number := float(numbers.numbers[index])) == number:
            values = (*values, number)
        if flags is not None and (state := int(flags.flags[index])) >= 0:
            values = (*values, ("flag", state))
        return values

    return values_of
