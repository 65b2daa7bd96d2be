"""What rules work on: the candidates of one answer, and what is known of items beside their ranking."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.items.expression import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What rules may look at. `vectors` returns unit rows (n, D) for item indices (n,), or None where there are none.

    `shown` counts how often an item was shown to the user and not clicked, by id. `showable` is (num_items,) bool for this request, `available`
    (at least as many) what the live catalogue shows at the end of it.
    """

    expressions: Compiled
    index: Callable[[str], int | None]
    showable: np.ndarray
    available: np.ndarray
    vectors: Callable[[np.ndarray], np.ndarray | None]
    shown: Mapping[str, int]
    now_ms: int


@dataclass(frozen=True, slots=True)
class Slate:
    """Candidates in order: item indices (n,), each once, and their scores (n,), which are log-likelihoods up to a constant.

    `num_wanted` of them and of `pinned` become the list. `pinned` holds the item of a position (from 1) and is no candidate.
    """

    indices: np.ndarray
    scores: np.ndarray
    num_wanted: int
    pinned: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        """How many places of the list are not pinned."""
        return max(0, self.num_wanted - len(self.pinned))

    @property
    def num_listed(self) -> int:
        """How many items the list has: as many as wanted, or fewer where there are not so many."""
        return min(self.num_wanted, len(self.indices) + len(self.pinned))

    def weighted(self, factors: np.ndarray) -> "Slate":
        """Return the candidates by descending score after each counts `factors` (n,) times as likely; ties keep their order."""
        scores = self.scores + np.log(factors)
        order = (-scores).argsort(kind="stable")
        return Slate(self.indices[order], scores[order], self.num_wanted, self.pinned)

    def only(self, places: Sequence[int] | np.ndarray) -> "Slate":
        """Return the candidates of these places (from 0) in this order."""
        return Slate(self.indices[places], self.scores[places], self.num_wanted, self.pinned)

    def led_by(self, places: Sequence[int]) -> "Slate":
        """Return the candidates of these places (from 0) first, and the others behind them in their order."""
        is_left = np.ones(len(self.indices), dtype=bool)
        is_left[places] = False
        return self.only(np.concatenate((np.array(places, dtype=np.int64), np.flatnonzero(is_left))))

    def places(self, items: Collection[int]) -> dict[int, int]:
        """Return the place (from 1) that each of these items has in the whole, however many are wanted."""
        found, pins = {index: position for position, index in self.pinned.items()}, sorted(self.pinned)
        for rank, index in enumerate(self.indices.tolist(), 1):
            if index in items:
                place = rank
                for position in pins:
                    place += position <= place
                found[index] = place
        return found

    def listed(self) -> Iterator[tuple[int, float | None]]:
        """Yield the items of the list and their scores; a pinned one has None.

        Where the list is shorter than a pin's position, the pin fills a place that no candidate is left for.
        """
        num_listed = self.num_listed
        beyond = [index for position, index in sorted(self.pinned.items()) if position > num_listed]
        scores: list[float | None] = self.scores[:num_listed].tolist()
        free = zip([*self.indices[:num_listed].tolist(), *beyond], [*scores, *[None] * len(beyond)], strict=True)
        for position in range(1, num_listed + 1):
            yield (self.pinned[position], None) if position in self.pinned else next(free)
