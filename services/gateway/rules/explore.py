"""Exploration: now and then the item at one position is drawn at random, so that the log says what else would have been clicked there.

    explore = { share = 0.05, position = 5, of = 50 }

With the probability `share` the item at `position` is drawn uniformly from the candidates at that place and behind it, up to place `of`. The drawn one and the
one of the position change places: none is doubled, and the list loses at most the one. Pinned items stay and are never drawn; what would break a cap that
holds is not drawn. Every other place follows from this one, so that all of the list's randomness is the propensity of its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.cap import Room
from services.gateway.rules.slate import Known, Slate


@dataclass(frozen=True, slots=True)
class Exploration:
    """How a surface explores: with which probability (above 0, at most 1), at which place of the list (from 1), and up to which place candidates are drawn."""

    share: float
    position: int
    of: int


def explore(
    slate: Slate, exploration: Exploration, rules: Rules, known: Known, draw: float
) -> tuple[Slate, tuple[float, ...]]:
    """Return the candidates in the order that is shown, and by place of the list the probability of its item given those above it.

    `draw` is uniform in [0, 1). A place keeps its score, whoever takes it.
    """
    ranks = _drawable(slate, exploration, rules, known)
    propensity = [1.0] * slate.num_listed
    if len(ranks) < 2:
        return slate, tuple(propensity)
    place = min(len(ranks) - 1, int(draw / exploration.share * len(ranks))) if draw < exploration.share else 0
    shown = ranks[place]
    of_each = exploration.share / len(ranks)
    propensity[exploration.position - 1] = of_each + (0.0 if place else 1.0 - exploration.share)
    if shown == ranks[0]:
        return slate, tuple(propensity)
    indices = slate.indices.copy()
    indices[[ranks[0], shown]] = indices[[shown, ranks[0]]]
    return replace(slate, indices=indices), tuple(propensity)


def _drawable(slate: Slate, exploration: Exploration, rules: Rules, known: Known) -> Sequence[int]:
    """Return the candidates (from 0 in their order) that may be shown at the position, first the one that is there; none where it is pinned or not listed."""
    if exploration.position > slate.num_listed or exploration.position in slate.pinned:
        return ()
    pins = np.array(sorted(slate.pinned), dtype=np.int64)
    before = exploration.position - 1 - int(np.count_nonzero(pins < exploration.position))
    if before >= len(slate.indices):  # a pin from beyond the list's end fills the place
        return ()
    num_in_range = exploration.of - int(np.count_nonzero(pins <= exploration.of))
    ranks = range(before, min(len(slate.indices), num_in_range))
    return ranks if not rules.caps else _within_caps(ranks, slate, rules, known)


def _within_caps(ranks: Sequence[int], slate: Slate, rules: Rules, known: Known) -> Sequence[int]:
    """Leave out what would bring a value of the list over its cap."""
    room, listed, indices = Room(rules.caps or (), known.expressions.columns), set[int](), slate.indices.tolist()
    for index, _ in slate.listed():
        listed.add(index)
        if index != indices[ranks[0]]:
            room.take(room.keys(index))
    return [rank for rank in ranks if indices[rank] in listed or room.is_for(room.keys(indices[rank]))]
