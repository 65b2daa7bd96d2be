"""The input of rules: the candidates of one answer, and item data other than the ranking."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from services.items.expression import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Data available to rules. `vectors` returns unit rows (n, D) for item indices (n,), or None.

    `shown` counts the user's impressions without a click by item id. `showable` is (num_items,) bool for this request;
    `available` (at least as many) is the live catalogue at the end of the request.
    """

    expressions: Compiled
    index: Callable[[str], int | None]
    showable: np.ndarray
    available: np.ndarray
    vectors: Callable[[np.ndarray], np.ndarray | None]
    shown: Mapping[str, int]
    now_ms: int


_NO_PINS: Mapping[int, int] = MappingProxyType({})


class Slate(NamedTuple):
    """Ordered candidates: unique item indices (n,) and their scores (n,), log-likelihoods up to a constant.

    The list takes `num_wanted` items from the candidates and `pinned`. `pinned` maps a position (from 1) to an item,
    which is not a candidate.
    """

    indices: np.ndarray
    scores: np.ndarray
    num_wanted: int
    pinned: Mapping[int, int] = _NO_PINS

    @property
    def num_free(self) -> int:
        """Number of list positions that are not pinned."""
        return max(0, self.num_wanted - len(self.pinned))

    @property
    def num_listed(self) -> int:
        """Length of the list: as many items as wanted, or all if there are fewer."""
        return min(self.num_wanted, len(self.indices) + len(self.pinned))

    def weighted(self, factors: np.ndarray) -> "Slate":
        """Return the candidates by descending score after multiplying their likelihoods by `factors` (n,).

        Ties keep their order.
        """
        scores = self.scores + np.log(factors)
        order = (-scores).argsort(kind="stable")
        return Slate(self.indices[order], scores[order], self.num_wanted, self.pinned)

    def only(self, places: Sequence[int] | np.ndarray) -> "Slate":
        """Return the candidates with these ranks (from 0), in this order."""
        ranks = np.array(places, dtype=np.int64)
        return Slate(self.indices[ranks], self.scores[ranks], self.num_wanted, self.pinned)

    def led_by(self, places: Sequence[int]) -> "Slate":
        """Return the candidates with these ranks (from 0) first, then all other candidates in their order."""
        is_left = np.ones(len(self.indices), dtype=bool)
        is_left[places] = False
        return self.only(np.concatenate((np.array(places, dtype=np.int64), np.flatnonzero(is_left))))

    def places(self, items: Collection[int]) -> dict[int, int]:
        """Return the position (from 1) of each of these items in the full order, beyond `num_wanted` too."""
        positions, pins = {index: position for position, index in self.pinned.items()}, sorted(self.pinned)
        for rank, index in enumerate(self.indices.tolist(), 1):
            if index in items:
                shifted = rank
                for position in pins:
                    shifted += position <= shifted
                positions[index] = shifted
        return positions

    def listed(self) -> Iterator[tuple[int, float | None]]:
        """Yield the items of the list with their scores; None for a pinned item.

        If the list is shorter than a pin's position, the pin moves up to a position left without a candidate.
        """
        num_listed = self.num_listed
        beyond = [index for position, index in sorted(self.pinned.items()) if position > num_listed]
        scores: list[float | None] = self.scores[:num_listed].tolist()
        free = zip([*self.indices[:num_listed].tolist(), *beyond], [*scores, *[None] * len(beyond)], strict=True)
        for position in range(1, num_listed + 1):
            yield (self.pinned[position], None) if position in self.pinned else next(free)
