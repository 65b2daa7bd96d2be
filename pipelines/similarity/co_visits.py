"""Counts which items follow or precede each other within a few events of one user, over training sequences.

An event `d` positions after another counts 1/d for the later item as a neighbour of the earlier item, and half of that
in reverse: next items are asked for more often than previous ones. A pair of events counts by the smaller of its two
weights. Items are counted in ranges, so that the number of pairs in memory is bounded. Numpy only.

Shape suffixes: V items, C candidates of an item, E events of all sequences together, P pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from models.similar import NONE

_PAIRS_AT_ONCE = 1 << 23


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Neighbours of each item, -1 for none, and their proximity. Both are (V, C)."""

    items_VC: np.ndarray
    figures_VC: np.ndarray


def count_co_visits(
    sequences: Sequence[np.ndarray], num_items: int, num_candidates: int, weights: Sequence[np.ndarray] | None = None
) -> Neighbours:
    """Return each item's most frequent companions, by their counts over the fourth root of the companion's events.

    The root keeps a rare companion visible among frequent ones.

    Args:
        sequences: Item indices of each user, oldest first.
        num_items: V.
        num_candidates: C.
        weights: Weight of each event, aligned with the sequences; None: all are 1.
    """
    events = _flat(sequences, weights)
    counts_V = np.bincount(events.items_E, events.weights_E, minlength=num_items)
    discounts_V = np.maximum(counts_V, 1) ** 0.25
    return _most_frequent(events, discounts_V, num_candidates, _CO_VISITS)


def count_transitions(
    sequences: Sequence[np.ndarray], num_items: int, num_candidates: int, weights: Sequence[np.ndarray] | None = None
) -> Neighbours:
    """Return each item's most frequent followers within five events, as fractions of all its followers.

    An item may follow itself. Arguments as for `count_co_visits`.
    """
    return _most_frequent(_flat(sequences, weights), np.ones(num_items), num_candidates, _TRANSITIONS)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Which pairs of events count: the maximum distance, the factor for the earlier item, and an item with itself."""

    reach: int
    backward: float
    with_itself: bool
    as_fractions: bool


_CO_VISITS = _Pairs(reach=10, backward=0.5, with_itself=False, as_fractions=False)
_TRANSITIONS = _Pairs(reach=5, backward=0.0, with_itself=True, as_fractions=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Events:
    """The events of all sequences, one after another: item, number of the sequence, and weight."""

    items_E: np.ndarray
    owners_E: np.ndarray
    weights_E: np.ndarray


def _flat(sequences: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None) -> _Events:
    items_E = np.concatenate([np.zeros(0, dtype=np.int64), *sequences])
    owners_E = np.repeat(np.arange(len(sequences)), [len(sequence) for sequence in sequences])
    weights_E = np.ones(len(items_E)) if weights is None else np.concatenate([np.zeros(0), *weights])
    return _Events(items_E, owners_E, weights_E)


def _most_frequent(events: _Events, discounts_V: np.ndarray, num_candidates: int, kind: _Pairs) -> Neighbours:
    """Return each item's partners with the highest counts over the partner's discount, best first, and their counts."""
    num_items = len(discounts_V)
    found_VC = np.full((num_items, num_candidates), NONE, dtype=np.int32)
    figures_VC = np.zeros((num_items, num_candidates), dtype=np.float32)
    for first, last in _ranges(np.bincount(events.items_E, minlength=num_items), kind.reach):
        keys_P, values_P = _pairs(events, num_items, first, last, kind)
        if not len(keys_P):
            continue
        items_P, others_P = np.divmod(keys_P, num_items)
        if kind.as_fractions:
            values_P = values_P / np.bincount(items_P, values_P, minlength=num_items)[items_P]
        order = np.lexsort((others_P, -values_P / discounts_V[others_P], items_P))
        items_P, others_P, values_P = items_P[order], others_P[order], values_P[order]
        starts_P = np.searchsorted(items_P, items_P)
        places_P = np.arange(len(items_P)) - starts_P
        kept = places_P < num_candidates
        found_VC[items_P[kept], places_P[kept]] = others_P[kept]
        figures_VC[items_P[kept], places_P[kept]] = values_P[kept]
    return Neighbours(found_VC, figures_VC)


def _ranges(counts_V: np.ndarray, reach: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of items [first, last) whose pairs fit into memory together."""
    pairs_V = np.cumsum(counts_V * 2 * reach)
    first = 0
    while first < len(counts_V):
        before = pairs_V[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(pairs_V, before + _PAIRS_AT_ONCE, side="right")))
        yield first, last
        first = last


def _pairs(events: _Events, num_items: int, first: int, last: int, kind: _Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of an item of the range with another, as item * V + other, ascending, and their counts."""
    items_E, owners_E, weights_E = events.items_E, events.owners_E, events.weights_E
    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []
    in_range_E = (items_E >= first) & (items_E < last)
    for distance in range(1, min(kind.reach, len(items_E) - 1) + 1):
        before, after = slice(0, -distance), slice(distance, None)
        is_pair = owners_E[before] == owners_E[after]
        if not kind.with_itself:
            is_pair &= items_E[before] != items_E[after]
        directions = ((before, after, 1.0), (after, before, kind.backward))
        for mine, other, factor in directions if kind.backward else directions[:1]:
            chosen = np.flatnonzero(is_pair & in_range_E[mine])
            keys.append(items_E[mine][chosen] * num_items + items_E[other][chosen])
            values.append(np.minimum(weights_E[mine][chosen], weights_E[other][chosen]) * factor / distance)
    if not keys:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    unique_P, index = np.unique(np.concatenate(keys), return_inverse=True)
    return unique_P, np.bincount(index.ravel(), np.concatenate(values))
