"""The rules stage: candidates of all tiers, through the rules and the surface's exploration, to the final list. Pure.

To add a rule: add its fields in `services/contracts/rules.py`, a file here, and an entry in `WEIGHTS` or `REORDERS`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np

from services.contracts.recommend import Tier
from services.contracts.rules import Rules
from services.gateway.ranking import Chosen, ItemRanking, merge
from services.gateway.rules.boost import boost
from services.gateway.rules.cap import cap
from services.gateway.rules.decay import decay
from services.gateway.rules.diversity import diversify
from services.gateway.rules.explore import Exploration, explore
from services.gateway.rules.freshness import freshen
from services.gateway.rules.pin import pin
from services.gateway.rules.slate import Known, Slate

_OF_SHARES = frozenset({Tier.POPULAR, Tier.SIMILAR})
_ENOUGH_A_PLACE = 5
"""Candidates per list position; the next tier is not consulted if the earlier tiers rank this many."""
_LEAST_SHARE = 1e-12
"""Lower bound of a popularity share, so that its logarithm is finite."""


WEIGHTS: Mapping[str, Callable[[Slate, Rules, Known], np.ndarray | None]] = {
    "boosts": boost,
    "freshness": freshen,
    "decay": decay,
}
"""Reweighting rules by the field that sets them: each candidate's factor (n,), or None for no change.

The factors multiply, so the candidates are sorted once.
"""
REORDERS: Mapping[str, Callable[[Slate, Iterator[int], Rules, Known], Iterator[int]]] = {
    "diversity": diversify,
    "caps": cap,
}
"""Reordering rules by the field that sets them: a function from an order of ranks (from 0) to another.

Each rule reorders the output of the previous one, starting with the weighted order. Pinned positions are reserved
first. The functions are lazy: they draw only as many candidates as are drawn from them, so a list of ten inspects few
candidates.
"""


class Ruled(NamedTuple):
    """The final list and how it was made: the candidates before the rules, each rule's result, and exploration.

    `explored` is set if exploration drew another item. `propensity` holds for each item the probability of being shown
    at its position given the items above it; None without exploration.
    """

    chosen: list[Chosen]
    before: Slate
    pinned: Slate | None
    weights: Sequence[tuple[str, np.ndarray]]
    orders: Sequence[tuple[str, Sequence[int]]]
    explored: Slate | None = None
    propensity: tuple[float, ...] | None = None

    def steps(self) -> list[tuple[str, Slate]]:
        """Return the candidates after each rule. Computed on demand, since few lists are inspected."""
        steps = [] if self.pinned is None else [("pins", self.pinned)]
        slate, product = self.pinned or self.before, np.ones(1)
        for name, factors in self.weights:
            product = product * factors
            steps.append((name, slate.weighted(product)))
        weighed = steps[-1][1] if self.weights else slate
        steps += [(name, weighed.led_by(places)) for name, places in self.orders]
        return steps if self.explored is None else [*steps, ("explore", self.explored)]


def apply_rules(
    rankings: Iterable[ItemRanking],
    rules: Rules,
    known: Known,
    num_wanted: int,
    num_candidates: int,
    answering: Tier,
    exploration: Exploration | None = None,
    draw: float = 0.0,
) -> Ruled:
    """Return the list of at most `num_wanted` items.

    A pinned item that no tier ranked gets the `answering` tier as its source. Scores are the weighted scores, lowered
    where a rule moved an item above one with a higher score, so that they never increase along the list. `draw`,
    uniform in [0, 1), decides the exploration.
    """
    scaled = map(_as_logs, rankings) if rules.reorder else rankings
    num_enough = _ENOUGH_A_PLACE * num_wanted if exploration is None else num_candidates
    parts = merge(scaled, known.showable, num_candidates, known.available, num_enough)
    before = slate = Slate(*_joined(parts), num_wanted)
    if rules.pins:
        slate = pin(slate, rules, known)
    pinned = slate if rules.pins else None
    weights = _weights_of(slate, rules, known)
    if weights:
        slate = slate.weighted(reduce(np.multiply, (factors for _, factors in weights)))
    order, orders = _ordered(slate, rules, known)
    listed = list(islice(order, slate.num_free)) if orders else None
    if listed is not None and (slate.pinned or exploration is not None):
        slate = slate.only(listed) if exploration is None else slate.led_by(listed)
        listed = None
    explored, propensity = None, None
    if exploration is not None:
        drawn, propensity = explore(slate, exploration, rules, known, draw)
        explored = None if drawn is slate else drawn
        slate = drawn
    scored = _never_rising(list(slate.listed())) if slate.pinned else _falling(slate, listed)
    return Ruled(
        chosen=_with_tiers(scored, parts, slate.pinned.values(), answering),
        before=before,
        pinned=pinned,
        weights=weights,
        orders=orders,
        explored=explored,
        propensity=propensity,
    )


def moves_of(ruled: Ruled) -> Iterator[tuple[int, int | None, int | None, tuple[str, ...]]]:
    """Yield each item listed before or after the rules: index, positions (from 1) before and after, and its rules.

    Yields nothing without rules.
    """
    steps = ruled.steps()
    if not steps:
        return
    num_wanted, stages = ruled.before.num_wanted, [ruled.before, *(slate for _, slate in steps)]
    after = {index: position for position, (index, _, _) in enumerate(ruled.chosen, 1)}
    shown = dict.fromkeys([*after, *ruled.before.indices[:num_wanted].tolist()])
    places = [slate.places(shown) for slate in stages]
    for index in shown:
        seen = [of_stage.get(index) for of_stage in places]
        movers = [name for (name, _), before, other in zip(steps, seen, seen[1:], strict=False) if before != other]
        yield index, seen[0], after.get(index), tuple(movers)


def _weights_of(slate: Slate, rules: Rules, known: Known) -> list[tuple[str, np.ndarray]]:
    """Return each reweighting rule that changes a candidate, and the candidates' factors (n,)."""
    return [
        (name, factors)
        for name, weigh in WEIGHTS.items()
        if getattr(rules, name) and (factors := weigh(slate, rules, known)) is not None
    ]


def _ordered(slate: Slate, rules: Rules, known: Known) -> tuple[Iterator[int], list[tuple[str, list[int]]]]:
    """Return the lazy order of ranks, and for each reordering rule the ranks that were drawn from it so far."""
    orders: list[tuple[str, list[int]]] = []
    order = iter(range(len(slate.indices)))
    for name, reorder in REORDERS.items():
        if getattr(rules, name):
            drawn: list[int] = []
            orders.append((name, drawn))
            order = _noting(reorder(slate, order, rules, known), drawn)
    return order, orders


def _noting(order: Iterator[int], drawn: list[int]) -> Iterator[int]:
    """Yield an order, and record the drawn ranks."""
    for rank in order:
        drawn.append(rank)
        yield rank


def _joined(parts: Sequence[ItemRanking]) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated indices and scores of all parts."""
    if not parts:
        return np.empty(0, dtype=np.int64), np.empty(0)
    if len(parts) == 1:
        return parts[0].indices, parts[0].scores
    return np.concatenate([part.indices for part in parts]), np.concatenate([part.scores for part in parts])


def _with_tiers(
    scored: Sequence[tuple[int, float]], parts: Sequence[ItemRanking], pinned: Collection[int], answering: Tier
) -> list[Chosen]:
    """Add the tier that ranked each item; `answering` for pinned items that no tier ranked."""
    first = parts[0].tier if parts else answering
    if len(parts) < 2 and not pinned:
        return [(index, score, first) for index, score in scored]
    tiers = dict.fromkeys([index for index, _ in scored], first)
    for part in parts[1:]:
        tiers.update(dict.fromkeys(tiers.keys() & part.indices.tolist(), part.tier))
    for index in pinned:
        if not any(index in part.indices for part in parts):
            tiers[index] = answering
    return [(index, score, tiers[index]) for index, score in scored]


def _never_rising(listed: Sequence[tuple[int, float | None]]) -> Sequence[tuple[int, float]]:
    """Give a pinned item the score of the next scored item, then lower scores where they increase."""
    given, following = [], None
    for index, score in reversed(listed):
        following = score if score is not None else following
        given.append((index, following))
    last, scored = max((score for _, score in listed if score is not None), default=0.0), []
    for index, own in reversed(given):
        last = last if own is None else min(last, own)
        scored.append((index, last))
    return scored


def _falling(slate: Slate, ranks: Sequence[int] | None) -> Sequence[tuple[int, float]]:
    """Return the items of these ranks, or the first, without pinned items, and scores lowered where they increase."""
    if ranks is None:
        ranks = range(slate.num_listed)
    return list(zip(map(slate.indices.item, ranks), accumulate(map(slate.scores.item, ranks), min), strict=True))


def _as_logs(ranking: ItemRanking) -> ItemRanking:
    """Return the ranking with log-likelihood scores.

    Decoder and student already use them, other tiers score by shares.
    """
    if ranking.tier not in _OF_SHARES:
        return ranking
    return ItemRanking(ranking.tier, ranking.indices, np.log(np.maximum(ranking.scores, _LEAST_SHARE)))
