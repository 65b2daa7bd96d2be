"""The stage: candidates of all tiers, through the list of rules and the surface's exploration, to the list that is shown. Pure.

To add a rule: its fields in `services/contracts/rules.py`, a file here, a line in `RULES`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.contracts.recommend import Tier
from services.contracts.rules import Rules
from services.gateway.request.candidates import Chosen, ItemRanking, choose
from services.gateway.rules.boost import boost
from services.gateway.rules.cap import cap
from services.gateway.rules.decay import decay
from services.gateway.rules.diversity import diversify
from services.gateway.rules.explore import Exploration, explore
from services.gateway.rules.freshness import freshen
from services.gateway.rules.pin import pin
from services.gateway.rules.slate import Known, Slate

_OF_SHARES = frozenset({Tier.POPULAR, Tier.SIMILAR})
_LEAST_SHARE = 1e-12
"""What a share counts as at least: its logarithm must be finite."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its name, whether a request has it, and what it makes of the candidates."""

    name: str
    is_set: Callable[[Rules], bool]
    apply: Callable[[Slate, Rules, Known], Slate]


RULES = (
    Rule("pins", lambda rules: bool(rules.pins), pin),
    Rule("boosts", lambda rules: bool(rules.boosts), boost),
    Rule("freshness", lambda rules: rules.freshness is not None, freshen),
    Rule("decay", lambda rules: rules.decay is not None, decay),
    Rule("diversity", lambda rules: bool(rules.diversity), diversify),
    Rule("caps", lambda rules: bool(rules.caps), cap),
)
"""In the order in which they run: what weighs comes before what reorders, and the pinned places are reserved first."""


@dataclass(frozen=True, slots=True)
class Ruled:
    """The list that is shown, and how it came about: the candidates before any rule, then after each one that is set, and after exploration where that drew another item.

    `propensity` has for each item the probability with which it was shown at its place given those above it; None without exploration.
    """

    chosen: list[Chosen]
    before: Slate
    steps: Sequence[tuple[str, Slate]]
    propensity: tuple[float, ...] | None = None


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
    """Return the list of at most `num_wanted` items. A pinned item that no tier ranked has the `answering` tier as its source.

    Scores after rules are those that the weights leave, moved down where a rule put an item before one with a higher score: as in every
    answer, they never rise along the list. `draw`, uniform in [0, 1), decides what exploration shows.
    """
    scaled = (_as_logs(one) for one in rankings) if rules.reorder else rankings
    candidates = choose(scaled, known.showable, num_candidates, known.available)
    indices, scores, tiers = zip(*candidates, strict=True) if candidates else ((), (), ())
    before = Slate(np.array(indices, dtype=np.int64), np.array(scores, dtype=np.float64), num_wanted)
    slate, steps = before, []
    for rule in RULES:
        if rule.is_set(rules):
            slate = rule.apply(slate, rules, known)
            steps.append((rule.name, slate))
    propensity = None
    if exploration is not None:
        explored, propensity = explore(slate, exploration, rules, known, draw)
        if not np.array_equal(explored.indices, slate.indices):
            slate = explored
            steps.append(("explore", slate))
    source_of = dict(zip(indices, tiers, strict=True))
    scored = _never_rising(list(slate.listed()))
    chosen = [(index, score, source_of.get(index, answering)) for index, score in scored]
    return Ruled(chosen, before, steps, propensity)


def moves_of(ruled: Ruled) -> Iterator[tuple[int, int | None, int | None, tuple[str, ...]]]:
    """Yield each item of the list before and after the rules: its index, its place (from 1) before and after, and the rules that moved it. None without a rule."""
    if not ruled.steps:
        return
    num_wanted, stages = ruled.before.num_wanted, [ruled.before, *(slate for _, slate in ruled.steps)]
    after = {index: place for place, (index, _, _) in enumerate(ruled.chosen, 1)}
    shown = dict.fromkeys([*after, *ruled.before.indices[:num_wanted].tolist()])
    places = [slate.places(shown) for slate in stages]
    for index in shown:
        seen = [of_stage.get(index) for of_stage in places]
        movers = [name for (name, _), one, other in zip(ruled.steps, seen, seen[1:], strict=False) if one != other]
        yield index, seen[0], after.get(index), tuple(movers)


def _never_rising(listed: Sequence[tuple[int, float | None]]) -> Sequence[tuple[int, float]]:
    """Set a pinned item's score to that of the next one that has one, then move scores down where they rise."""
    given, following = [], None
    for index, score in reversed(listed):
        following = score if score is not None else following
        given.append((index, following))
    last, scored = max((score for _, score in listed if score is not None), default=0.0), []
    for index, own in reversed(given):
        last = last if own is None else min(last, own)
        scored.append((index, last))
    return scored


def _as_logs(ranking: ItemRanking) -> ItemRanking:
    """Return a ranking whose scores are log-likelihoods, as those of decoder and student are up to a constant; those of other tiers are shares."""
    if ranking.tier not in _OF_SHARES:
        return ranking
    logs = np.log(np.maximum(np.asarray(ranking.scores, dtype=np.float64), _LEAST_SHARE))
    return ItemRanking(ranking.tier, ranking.indices, logs.tolist())
