"""Each rule equals its definition, and in combination no item is lost or repeated, and pins, caps and blocks hold."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import Catalogue
from services.contracts.filters import Condition, OneOf, Range
from services.contracts.items import ItemState
from services.contracts.recommend import Filters, RecommendRequest, Tier
from services.contracts.rules import Boost, Cap, Freshness, Pin, Rules
from services.gateway.ranking import ItemRanking
from services.gateway.request.masks import masks_for
from services.gateway.rules.block import without_blocked
from services.gateway.rules.slate import Known
from services.gateway.rules.stage import Ruled, apply_rules, moves_of
from services.items.expression import Expressions
from services.items.layout import ItemLayout

NUM_ITEMS = 12
COLOURS = ("red", "green", "blue")
NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
VECTORS = np.random.default_rng(7).normal(size=(NUM_ITEMS, 3)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)


def layout() -> ItemLayout:
    """Return twelve items, red, green and blue in turn, the first six with a price, published an hour apart."""
    names = tuple(f"i{index}" for index in range(NUM_ITEMS))
    colours = tuple((COLOURS[index % 3],) for index in range(NUM_ITEMS))
    codes = np.arange(NUM_ITEMS, dtype=np.int32)[:, None]
    items = ItemLayout(Catalogue(names, names, colours, codes, (NUM_ITEMS,), np.ones(NUM_ITEMS)))
    for index, name in enumerate(names):
        attributes = {"price": float(index)} if index < 6 else {}
        published_ms = NOW_MS - index * HOUR_MS
        items.put(name, ItemState(item_id=name, attributes=attributes, published_ms=published_ms), NOW_MS)
    return items


ITEMS = layout()
KNOWN = Known(
    expressions=Expressions(ITEMS).compiled([]),
    index=ITEMS.index,
    showable=ITEMS.columns.available.copy(),
    available=ITEMS.columns.available,
    vectors=lambda indices: VECTORS[indices],
    shown={},
    now_ms=NOW_MS,
)


def run(
    ranking: Sequence[int],
    rules: Rules,
    k: int = 5,
    scores: Sequence[float] | None = None,
    known: Known = KNOWN,
    num_candidates: int = NUM_ITEMS,
) -> Ruled:
    """Apply rules to one ranking of the student."""
    given = scores or [-float(position) for position in range(len(ranking))]
    return apply_rules(
        [ItemRanking.in_order(Tier.STUDENT, dict(zip(ranking, given, strict=True)))],
        rules,
        known,
        k,
        num_candidates,
        Tier.STUDENT,
    )


def chosen(ruled: Ruled) -> list[int]:
    return [index for index, _, _ in ruled.chosen]


ROWS = st.permutations(range(NUM_ITEMS)).flatmap(lambda row: st.integers(0, NUM_ITEMS).map(lambda size: row[:size]))
CLAUSES = st.one_of(
    st.sampled_from(COLOURS).map(lambda colour: Condition.of("categories", OneOf((colour,)))),
    st.integers(0, 8).map(lambda limit: Condition.of("price", Range(lt=float(limit)))),
)
PINS = st.lists(
    st.builds(Pin, st.integers(0, NUM_ITEMS + 1).map(lambda index: f"i{index}"), st.integers(1, NUM_ITEMS)),
    unique_by=(lambda pin: pin.item_id, lambda pin: pin.position),  # type: ignore[arg-type]
    max_size=4,
).map(tuple)
RULES = st.builds(
    Rules,
    boosts=st.lists(st.builds(Boost, CLAUSES, st.floats(0.01, 100)), max_size=2).map(tuple),
    pins=PINS,
    caps=st.lists(st.builds(Cap, st.sampled_from(["categories", "price", "none"]), st.integers(1, 3)), max_size=2).map(
        tuple
    ),
    diversity=st.none() | st.floats(0, 1),
    decay=st.none() | st.floats(0.01, 1),
    freshness=st.none() | st.builds(Freshness, st.floats(0.01, 100), st.floats(1, 100)),
)
SHOWN = st.dictionaries(st.integers(0, NUM_ITEMS + 1).map(lambda index: f"i{index}"), st.integers(0, 1_000))
MASKS = st.lists(st.booleans(), min_size=NUM_ITEMS, max_size=NUM_ITEMS)


def test_rules_choose_from_five_candidates_a_position() -> None:
    """A boosted item of the next tier is found while the first tier ranks fewer candidates than that."""
    rules = Rules(boosts=(Boost(Condition.of("categories", OneOf(("blue",))), 100.0),))
    tiers = [
        ItemRanking.in_order(Tier.STUDENT, {0: 0.0, 1: -1.0, 3: -2.0}),
        ItemRanking.in_order(Tier.POPULAR, {2: 1.0}),
    ]

    ruled = apply_rules(tiers, rules, KNOWN, 2, NUM_ITEMS, Tier.STUDENT)

    assert chosen(ruled)[0] == 2


@given(ROWS, RULES, st.integers(1, NUM_ITEMS), SHOWN, MASKS)
def test_no_item_is_lost_or_doubled(
    row: list[int], rules: Rules, k: int, shown: dict[str, int], showable: list[bool]
) -> None:
    """The list has each item once, only allowed items, as many as possible, with non-rising scores."""
    mask = np.zeros(len(KNOWN.showable), dtype=bool)
    mask[:NUM_ITEMS] = showable
    known = replace(KNOWN, shown=shown, showable=mask)
    pinned = {pin.item_id for pin in rules.pins or () if pin.position <= k}
    offered = {index for index in {*row, *(ITEMS.indices(pinned))} if mask[index]}

    ruled = run(row, rules, k, known=known)

    assert len(chosen(ruled)) == len(set(chosen(ruled))) == min(k, len(offered))
    assert set(chosen(ruled)) <= offered
    scores = [score for _, score, _ in ruled.chosen]
    assert scores == sorted(scores, reverse=True)
    assert all(math.isfinite(score) for score in scores)
    assert {tier for _, _, tier in ruled.chosen} <= {Tier.STUDENT}


@given(ROWS, RULES, st.integers(1, NUM_ITEMS))
def test_pins_hold(row: list[int], rules: Rules, k: int) -> None:
    """A pinned item is at its position; in a shorter list it follows the earlier pins at the end."""
    listed = chosen(run(row, rules, k))

    pins = sorted(
        (pin.position, index)
        for pin in rules.pins or ()
        if pin.position <= k and (index := ITEMS.index(pin.item_id)) is not None
    )
    for position, index in pins:
        if position <= len(listed):
            assert listed[position - 1] == index
    behind = [index for position, index in pins if position > len(listed)]
    assert [index for index in listed if index in behind] == behind


@given(ROWS, RULES, st.integers(1, NUM_ITEMS))
def test_caps_hold_until_nothing_else_is_left(row: list[int], rules: Rules, k: int) -> None:
    """Each free position has the first candidate that fits all caps, or the first candidate if none fits."""
    ruled = run(row, rules, k)
    without = run(row, msgspec.structs.replace(rules, caps=()), k)
    order = without.steps()[-1][1].indices.tolist() if without.steps() else row
    if rules.diversity:  # diversity looks further with caps
        before_caps = [slate for name, slate in ruled.steps() if name == "diversity"]
        order = before_caps[-1].indices.tolist()
    pinned = dict(ruled.steps()[0][1].pinned) if rules.pins else {}

    assert [index for index in chosen(ruled) if index not in pinned.values()] == slow_caps(
        order, rules.caps or (), list(pinned.values()), len(chosen(ruled)) - len(pinned)
    )


def slow_caps(order: list[int], caps: Sequence[Cap], pinned: list[int], num_places: int) -> list[int]:
    """Fill position by position, counting from scratch each time."""
    left, taken = list(order), []
    for _ in range(num_places):
        for fits in (True, False):
            fitting = [index for index in left if not fits or all(room(cap, [*pinned, *taken], index) for cap in caps)]
            if fitting:
                break
        taken.append(fitting[0])
        left.remove(fitting[0])
    return taken


def room(cap: Cap, listed: list[int], index: int) -> bool:
    """Return whether adding this item keeps the cap."""
    counts = Counter(value for item in listed for value in values(cap.attribute, item))
    return all(counts[value] < cap.most for value in values(cap.attribute, index))


def values(attribute: str, index: int) -> tuple[object, ...]:
    """Return an item's values, from the construction of the items."""
    match attribute:
        case "categories":
            return (COLOURS[index % 3],)
        case "price":
            return (float(index),) if index < 6 else ()
    return ()


@given(
    ROWS.filter(lambda row: len(row) > 1),
    st.lists(st.floats(-20, 20), min_size=NUM_ITEMS, max_size=NUM_ITEMS),
    st.floats(0.01, 1),
    st.integers(2, NUM_ITEMS),
)
def test_diversity_is_maximal_marginal_relevance(row: list[int], raw: list[float], weight: float, k: int) -> None:
    """Each position has an item of the largest value by brute force; items after the list keep their order."""
    scores = sorted(raw[: len(row)], reverse=True)
    ruled = run(row, Rules(diversity=weight), k, scores)
    indices = ruled.steps()[-1][1].indices.tolist()
    span = scores[0] - scores[-1]
    relevance = {index: (score - scores[-1]) / span if span else 1.0 for index, score in zip(row, scores, strict=True)}

    for position in range(min(k, len(row))):
        value = {
            index: (1 - weight) * relevance[index]
            - weight * max((float(VECTORS[index] @ VECTORS[earlier]) for earlier in indices[:position]), default=0.0)
            for index in indices[position:]
        }
        assert value[indices[position]] >= max(value.values()) - 1e-5
    assert indices[k:] == [index for index in row if index in indices[k:]]


def test_diversity_compares_the_leading_candidates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates after the compared candidates keep their positions, however similar they are."""
    row, rules = list(range(NUM_ITEMS)), Rules(diversity=0.9)
    compared = chosen(run(row[:6], rules, 6))
    monkeypatch.setattr("services.gateway.rules.diversity.MAX_COMPARED", 6)

    assert chosen(run(row, rules, NUM_ITEMS)) == [*compared, *row[6:]]


@given(ROWS, CLAUSES, st.floats(0.01, 100), st.floats(0.01, 1), SHOWN)
def test_weights_are_factors_of_likelihood(
    row: list[int], where: Condition, factor: float, share: float, shown: dict[str, int]
) -> None:
    """After boosts, freshness and decay, items are ordered by the product of all factors and the likelihood."""
    fresh = Freshness(half_life_h=2.0, factor=3.0)
    rules, known = Rules(boosts=(Boost(where, factor),), decay=share, freshness=fresh), replace(KNOWN, shown=shown)

    slate = run(row, rules, known=known).steps()[-1][1]

    log_weight = {}
    for position, index in enumerate(row):
        held = slow_holds(where, index)
        log_factor = math.log(factor) if held else 0.0
        log_factor += math.log(1 + 2.0 * 2 ** (-index / 2.0))
        log_factor += min(100, shown.get(f"i{index}", 0)) * math.log(share)
        log_weight[index] = -float(position) + log_factor
    assert slate.scores == pytest.approx([log_weight[index] for index in slate.indices.tolist()], abs=1e-9)
    assert (np.diff(slate.scores) <= 0).all()


def slow_holds(where: Condition, index: int) -> bool:
    """Return whether a condition holds, from the construction of the items."""
    match where.test:
        case OneOf(colours):
            return COLOURS[index % 3] in colours
        case Range() as within:
            assert within.lt is not None
            return index < min(6, within.lt)
    raise AssertionError


def test_popularity_counts_as_a_likelihood() -> None:
    """A boost moves an item equally far for the popular tier's fractions as for logarithmic scores."""
    shares, rules = [0.5, 0.3, 0.2], Rules(boosts=(Boost(Condition.of("categories", OneOf(("blue",))), 2.0),))
    popular = ItemRanking.in_order(Tier.POPULAR, dict(enumerate(shares)))
    student = ItemRanking(Tier.STUDENT, popular.indices, np.log(shares))

    lists = [apply_rules([ranking], rules, KNOWN, 3, 12, ranking.tier) for ranking in (popular, student)]

    assert [chosen(ruled) for ruled in lists] == [[0, 2, 1]] * 2


@given(ROWS, st.lists(CLAUSES, min_size=1, max_size=3).map(tuple))
def test_blocks_hold_for_every_ranking(row: list[int], blocks: tuple[Condition, ...]) -> None:
    """A blocked item is in no mask, so no tier ranks it and no pin shows it."""
    expression = without_blocked(Rules(blocks=blocks))
    request = RecommendRequest(request_id="r", user_id="u", exclude_seen=False)
    request = msgspec.structs.replace(request, filters=Filters.of(expression))
    masks = masks_for(request, (), ITEMS, expressions=KNOWN.expressions)
    pins = tuple(Pin(f"i{index}", index + 1) for index in range(NUM_ITEMS))

    listed = chosen(run(row, Rules(pins=pins), 12, known=replace(KNOWN, showable=masks.showable)))

    assert sorted(listed) == [
        index for index in range(NUM_ITEMS) if not any(slow_holds(block, index) for block in blocks)
    ]


def test_an_item_that_is_newer_than_the_request_is_not_pinned() -> None:
    """The request's mask ends before items that were added meanwhile."""
    known = replace(KNOWN, showable=KNOWN.showable[:9])

    assert chosen(run([0, 1], Rules(pins=(Pin("i9", 1), Pin("i8", 2))), known=known)) == [0, 8, 1]


def test_each_item_has_the_tier_that_ranked_it() -> None:
    """Items of a later ranking have its tier; a pinned item that no tier ranked has the answering tier."""
    parts = [ItemRanking.in_order(Tier.POPULAR, {0: 0.5, 1: 0.3}), ItemRanking.in_order(Tier.STUDENT, {2: -1.0})]

    ruled = apply_rules(parts, Rules(pins=(Pin("i9", 1), Pin("i2", 2))), KNOWN, 3, 12, Tier.LLM)

    assert {index: tier for index, _, tier in ruled.chosen} == {9: Tier.LLM, 2: Tier.STUDENT, 0: Tier.POPULAR}


def test_an_item_without_a_vector_or_time_is_as_it_was() -> None:
    """Diversity needs vectors, and freshness publication times; without them the order does not change."""
    known = replace(KNOWN, vectors=lambda indices: None)
    items = ItemLayout(ITEMS.catalogue)
    timeless = replace(KNOWN, expressions=Expressions(items))

    assert chosen(run([3, 1, 2], Rules(diversity=0.9), known=known)) == [3, 1, 2]
    assert chosen(run([3, 1, 2], Rules(freshness=Freshness(1.0, 9.0)), known=timeless)) == [3, 1, 2]


def test_the_moves_are_told_by_place_and_rule() -> None:
    """Each moved item has its positions before and after, and the rules that changed its position."""
    rules = Rules(pins=(Pin("i9", 1),), caps=(Cap("categories", 1),))

    moves = {index: move for index, *move in moves_of(run([0, 3, 1, 2], rules, k=3))}

    assert moves == {
        9: [None, 1, ("pins",)],
        1: [3, 2, ("pins", "caps")],
        2: [4, 3, ("pins", "caps")],
        0: [1, None, ("pins", "caps")],
        3: [2, None, ("pins", "caps")],
    }
