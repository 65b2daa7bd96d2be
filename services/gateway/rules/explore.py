"""Exploration: sometimes draws the item at one position at random, to log what else would have been clicked there.

    explore = { share = 0.05, position = 5, of = 50 }

With probability `share`, the item at `position` is drawn uniformly from the candidates ranked from there to `of`. The
drawn item and the original item swap positions, so no item is duplicated and the list loses at most the original.
Pinned items stay and are never drawn; candidates that would violate a satisfied cap are not drawn. All other positions
are deterministic, so the propensity of this position covers all randomness of the list.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from services.contracts.message import InvalidField, Message
from services.contracts.rules import Rules
from services.gateway.ranking import NUM_CANDIDATES
from services.gateway.rules.cap import Room
from services.gateway.rules.slate import Known, Slate


class Exploration(Message, frozen=True):
    """A surface's exploration: probability, list position (from 1), last rank to draw from."""

    share: Annotated[float, Meta(gt=0, le=1)]
    position: Annotated[int, Meta(ge=1, lt=NUM_CANDIDATES)]
    of: Annotated[int, Meta(le=NUM_CANDIDATES)]

    def __post_init__(self) -> None:
        """Check that there is another candidate to draw. Raises InvalidField."""
        super().__post_init__()
        if self.of <= self.position:
            raise InvalidField("of", f"{self.of} is out of range", f"send {self.position + 1} to {NUM_CANDIDATES}")


def explore(
    slate: Slate, exploration: Exploration, rules: Rules, known: Known, draw: float
) -> tuple[Slate, tuple[float, ...]]:
    """Return the candidates in display order, and by position the probability of its item given the items above it.

    `draw` is uniform in [0, 1). Scores stay with their positions when items swap.
    """
    ranks = _drawable(slate, exploration, rules, known)
    propensity = [1.0] * slate.num_listed
    if len(ranks) < 2:
        return slate, tuple(propensity)
    drawn = min(len(ranks) - 1, int(draw / exploration.share * len(ranks))) if draw < exploration.share else 0
    shown = ranks[drawn]
    of_each = exploration.share / len(ranks)
    propensity[exploration.position - 1] = of_each + (0.0 if drawn else 1.0 - exploration.share)
    if shown == ranks[0]:
        return slate, tuple(propensity)
    indices = slate.indices.copy()
    indices[[ranks[0], shown]] = indices[[shown, ranks[0]]]
    return slate._replace(indices=indices), tuple(propensity)


def _drawable(slate: Slate, exploration: Exploration, rules: Rules, known: Known) -> Sequence[int]:
    """Return the ranks (from 0) that may be shown at the position, the current one first.

    Returns no ranks if the position is pinned or beyond the list.
    """
    if exploration.position > slate.num_listed or exploration.position in slate.pinned:
        return ()
    pins = np.array(sorted(slate.pinned), dtype=np.int64)
    before = exploration.position - 1 - int(np.count_nonzero(pins < exploration.position))
    if before >= len(slate.indices):  # a pin from beyond the list's end fills the position
        return ()
    num_in_range = exploration.of - int(np.count_nonzero(pins <= exploration.of))
    ranks = range(before, min(len(slate.indices), num_in_range))
    return ranks if not rules.caps else _within_caps(ranks, slate, rules, known)


def _within_caps(ranks: Sequence[int], slate: Slate, rules: Rules, known: Known) -> Sequence[int]:
    """Drop the candidates that would push a value of the list over its cap."""
    room, listed, indices = Room(rules.caps or (), known.expressions.columns), set[int](), slate.indices.tolist()
    for index, _ in slate.listed():
        listed.add(index)
        if index != indices[ranks[0]]:
            room.take(index)
    return [rank for rank in ranks if indices[rank] in listed or room.is_for(indices[rank])]
