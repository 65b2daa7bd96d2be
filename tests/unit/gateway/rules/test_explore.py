"""Exploration: drawn items, their probabilities, and the rules that the list keeps."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from services.contracts.recommend import Tier
from services.contracts.rules import NO_RULES, Cap, Pin, Rules
from services.gateway.ranking import ItemRanking
from services.gateway.rules.cap import values_by
from services.gateway.rules.explore import Exploration
from services.gateway.rules.stage import Ruled, apply_rules, moves_of
from tests.unit.gateway.rules.test_rules import ITEMS, KNOWN, NUM_ITEMS, ROWS, RULES, chosen

EXPLORATIONS = st.builds(
    lambda share, position, more: Exploration(share, position, position + more),
    st.floats(0.001, 1),
    st.integers(1, 5),
    st.integers(1, NUM_ITEMS),
)
NEVER = 1.0 - 2**-53
"""The largest possible draw."""


def run(row: list[int], rules: Rules, k: int, exploration: Exploration | None, draw: float = 0.0) -> Ruled:
    """Apply rules and exploration to one ranking of the student."""
    ranking = ItemRanking(Tier.STUDENT, np.array(row, dtype=np.int64), -np.arange(float(len(row))))
    return apply_rules([ranking], rules, KNOWN, k, NUM_ITEMS, Tier.STUDENT, exploration, draw)


def excess(items: list[int], rules: Rules) -> int:
    """Return how many items of a list exceed its caps."""
    over = 0
    for cap in rules.caps or ():
        counts = Counter(value for item in items for value in values_by(ITEMS.columns, cap.attribute)(item))
        over += sum(max(0, times - cap.most) for times in counts.values())
    return over


def swapped(items: list[int], first: int, other: int) -> list[int]:
    """Return the list with the positions of two items swapped, if they differ."""
    return [{first: other, other: first}.get(item, item) for item in items]


def drawable(row: list[int], rules: Rules, k: int, exploration: Exploration) -> set[int]:
    """Return by brute force the items that may be drawn: in range, not pinned, and within the caps."""
    plain = run(row, rules, k, None)
    listed, last = chosen(plain), plain.steps()[-1][1] if plain.steps() else plain.before
    at = listed[exploration.position - 1] if exploration.position <= len(listed) else None
    if at is None or at in last.pinned.values():
        return set()
    places = last.places(set(last.indices.tolist()))
    items = {at}
    for item, position in places.items():
        if item in last.pinned.values() or not exploration.position <= position <= exploration.of:
            continue
        others = [item for item in listed if item != at]
        is_kept = item in listed or excess([*others, item], rules) == excess(others, rules)
        items |= {item} if is_kept else set()
    return items


@given(ROWS, RULES, st.integers(1, NUM_ITEMS), EXPLORATIONS)
def test_what_is_drawn_is_what_may_be_and_the_list_keeps_its_promises(
    row: list[int], rules: Rules, k: int, exploration: Exploration
) -> None:
    """Each drawable item is drawn, its propensities sum to 1, other positions have 1, and pins, caps and order hold."""
    unexplored = run(row, rules, k, None)
    plain, may = chosen(unexplored), drawable(row, rules, k, exploration)
    last = unexplored.steps()[-1][1] if unexplored.steps() else unexplored.before
    draws = [exploration.share * (index + 0.5) / len(may) for index in range(len(may))] or [0.0]

    seen: dict[int, float] = {}
    for draw in [*draws, NEVER]:
        ruled = run(row, rules, k, exploration, draw)
        listed, propensity = chosen(ruled), ruled.propensity
        assert propensity is not None
        assert len(propensity) == len(set(listed)) == len(listed) == len(plain)
        assert len(set(plain) - set(listed)) <= 1
        assert all(listed[position - 1] == item for position, item in last.pinned.items() if position <= len(listed))
        assert excess(listed, rules) <= excess(plain, rules)
        scores = [score for _, score, _ in ruled.chosen]
        assert scores == sorted(scores, reverse=True)
        assert ([name for name, _ in ruled.steps()][-1:] == ["explore"]) == (plain != listed)
        assert {item for item, _, _, movers in moves_of(ruled) if "explore" in movers} >= set(listed) - set(plain)
        if len(may) < 2:
            assert (listed, set(propensity)) == (plain, {1.0} if plain else set())
            continue
        index = exploration.position - 1
        assert listed == swapped(plain, plain[index], listed[index])
        assert all(probability == 1.0 for other, probability in enumerate(propensity) if other != index)
        seen[listed[index]] = propensity[index]

    if len(may) > 1:
        assert seen.keys() == may
        assert sum(seen.values()) == pytest.approx(1.0)
        others = [value for item, value in seen.items() if item != plain[exploration.position - 1]]
        assert others == pytest.approx([exploration.share / len(may)] * len(others))


@pytest.mark.parametrize(
    ("rules", "k", "may"),
    [
        (NO_RULES, 3, {1, 2, 3, 4, 5, 6, 7}),
        (Rules(pins=(Pin("i5", 1), Pin("i9", 4))), 5, {0, 1, 2, 3, 4, 6}),
        (Rules(caps=(Cap("categories", 1),)), 3, {1, 2, 4, 7}),
    ],
    ids=["plain", "pins", "caps"],
)
def test_each_item_is_shown_as_often_as_its_propensity_says(rules: Rules, k: int, may: set[int]) -> None:
    """Over 20,000 draws the counts fit the recorded propensities (chi-square), also with pins and caps."""
    exploration, rng = Exploration(0.3, 2, 8), np.random.default_rng(11)
    shown: Counter[int] = Counter()
    recorded: dict[int, float] = {}
    num_draws = 20_000

    for draw in rng.random(num_draws):
        ruled = run(list(range(NUM_ITEMS)), rules, k, exploration, float(draw))
        assert ruled.propensity is not None
        item = chosen(ruled)[1]
        shown[item] += 1
        recorded[item] = ruled.propensity[1]

    assert set(shown) == may
    expected = [num_draws * recorded[item] for item in sorted(recorded)]
    assert chisquare([shown[item] for item in sorted(recorded)], expected).pvalue > 0.001


def test_scores_of_a_surface_that_only_explores_are_the_tier_s() -> None:
    """Scores keep their scale, and a position keeps its score for any item."""
    popular = ItemRanking.in_order(Tier.POPULAR, {3: 0.4, 1: 0.3, 2: 0.2, 0: 0.1})

    ruled = apply_rules([popular], NO_RULES, KNOWN, 2, 4, Tier.POPULAR, Exploration(1.0, 1, 4), 0.99)

    assert ruled.chosen == [(0, 0.4, Tier.POPULAR), (1, 0.3, Tier.POPULAR)]
    assert ruled.propensity == (0.25, 1.0)
