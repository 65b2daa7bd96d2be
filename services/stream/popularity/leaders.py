"""The items with the highest totals, kept while single totals rise, so that nobody sorts them all. Pure.

A *score* orders items: the total first, then the place of the id, so no two are equal. The members hold every listed item whose score reaches
the floor. Rising totals keep that true one item at a time. Falling ones do not break it, but may leave too few members above the floor; then the
members are chosen anew over all items.
"""

import numpy as np

from services.stream.popularity.listed_items import Listing

_FEWEST, _MOST = 512, 2_048
"""Members after a choice, and before the next."""
_PLACE_BITS = 32


class Leaders:
    """The members of one window."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._floor: int | None = None
        """The lowest score that makes a member; None while every counted item is one."""
        self._listing: Listing | None = None

    def forget(self) -> None:
        """Choose anew at the next call of `best`: totals have risen that `rose` was not told of."""
        self._listing = None

    def rose(self, number: int, total: np.ndarray, listing: Listing) -> None:
        """Take an item in, whose total has risen, if its score reaches the floor."""
        if number in self._members or listing is not self._listing:
            return
        if self._floor is None or (int(total[number]) << _PLACE_BITS) - int(listing.place[number]) >= self._floor:
            self._members.add(number)
            if len(self._members) > _MOST:
                self._raise_floor(total, listing)

    def best(self, num_items: int, total: np.ndarray, listing: Listing) -> list[int]:
        """Return the numbers of the best listed items whose total is above 0, best first."""
        members, scores = self._ranked(total, listing)
        if listing is not self._listing or not self._suffice(num_items, scores):
            self._listing = listing
            self._choose(max(_FEWEST, 2 * num_items), total, listing)
            members, _ = self._ranked(total, listing)
        best = members[:num_items]
        numbers: list[int] = best[total[best] > 0].tolist()
        return numbers

    def _suffice(self, num_items: int, scores: np.ndarray) -> bool:
        """Whether no item that is no member may be among the best."""
        return self._floor is None or (len(scores) >= num_items and int(scores[num_items - 1]) >= self._floor)

    def _ranked(self, total: np.ndarray, listing: Listing) -> tuple[np.ndarray, np.ndarray]:
        """Return the members and their scores, best first."""
        members = np.fromiter(self._members, np.int64, len(self._members))
        scores = _scores(members, total, listing)
        order = np.argsort(-scores)
        return members[order], scores[order]

    def _raise_floor(self, total: np.ndarray, listing: Listing) -> None:
        members, scores = self._ranked(total, listing)
        floor = int(scores[_FEWEST - 1])
        self._members = set(members[:_FEWEST].tolist())
        self._floor = floor if self._floor is None else max(self._floor, floor)

    def _choose(self, num_members: int, total: np.ndarray, listing: Listing) -> None:
        """Choose the members over all items, first among those whose total is near the floor's or above."""
        near = 1 if self._floor is None else (self._floor >> _PLACE_BITS) * 7 // 8
        listed = total[: len(listing.is_listed)]
        for lowest in (max(1, near), 1):
            counted = np.flatnonzero((listed >= lowest) & listing.is_listed)
            if len(counted) >= num_members:
                break
        if len(counted) <= num_members:
            self._members, self._floor = set(counted.tolist()), None
            return
        scores = _scores(counted, total, listing)
        self._floor = int(np.partition(scores, -num_members)[-num_members])
        self._members = set(counted[scores >= self._floor].tolist())


def _scores(numbers: np.ndarray, total: np.ndarray, listing: Listing) -> np.ndarray:
    scores: np.ndarray = (total[numbers].astype(np.int64) << _PLACE_BITS) - listing.place[numbers]
    return scores
