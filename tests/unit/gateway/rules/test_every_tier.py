"""Filters and rules apply equally in every tier, and to the items that fill its list."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.contracts.events import decode_impression
from services.contracts.filters import Condition, Expression, OneOf, Range
from services.contracts.items import ItemState
from services.contracts.recommend import Filters, Tier
from services.contracts.rules import Boost, Cap, Pin, Rules
from services.errors import DependencyUnavailable
from tests.unit.gateway.world import NOW_S, World, started_world, user

EVEN = Expression.of(must=[Condition.of("categories", OneOf(("even",)))])
I10 = Condition.of("item_id", OneOf(("i10",)))


def shed(world: World) -> None:
    """Strain the gateway so that this priority gets answers from memory only."""
    world.strain(2)


TIERS = [
    pytest.param("listed", lambda _: None, Tier.PRECOMPUTED, id="stored list"),
    pytest.param("long", lambda _: None, Tier.LLM, id="llm"),
    pytest.param("short", lambda _: None, Tier.STUDENT, id="student"),
    pytest.param("nobody", lambda _: None, Tier.POPULAR, id="popular"),
    pytest.param(
        "long",
        lambda world: vars(world.llm).update(error=DependencyUnavailable("llm", 1.0)),
        Tier.STUDENT,
        id="fallback",
    ),
    pytest.param("long", shed, Tier.POPULAR, id="shed"),
]


@pytest.mark.parametrize(("user_id", "spoil", "tier"), TIERS)
async def test_an_expression_holds(world: World, user_id: str, spoil: Callable[[World], object], tier: Tier) -> None:
    """Only matching items are shown, as many as requested."""
    spoil(world)

    answer = await world.recommend(user_id, k=4, filters=Filters.of(EVEN))

    assert answer.tier is tier
    assert len(answer.items) == 4
    assert all(int(item.item_id[1:]) % 2 == 0 for item in answer.items)


@pytest.mark.parametrize(("user_id", "spoil", "tier"), TIERS)
async def test_rules_hold(world: World, user_id: str, spoil: Callable[[World], object], tier: Tier) -> None:
    """Pins, caps and blocks hold in a full list, also for a small k."""
    rules = Rules(
        pins=(Pin("i15", 2),),
        caps=(Cap("categories", 2),),
        blocks=(Condition.of("popularity", Range(gt=13.0)),),
        boosts=(Boost(I10, 100.0), Boost(I10, 100.0)),
    )
    spoil(world)

    answer = await world.recommend(user_id, k=4, rules=rules)

    shown = [item.item_id for item in answer.items]
    assert answer.tier is tier
    assert len(set(shown)) == 4
    assert shown[:2] == ["i10", "i15"]
    assert sorted(int(item_id[1:]) % 2 for item_id in shown) == [0, 0, 1, 1]
    assert all(int(item_id[1:]) >= 7 for item_id in shown)
    scores = [item.score for item in answer.items]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(("user_id", "spoil", "tier"), TIERS)
async def test_exploration_is_recorded(
    tmp_path: Path, user_id: str, spoil: Callable[[World], object], tier: Tier
) -> None:
    """Position 2 is drawn from items 2 to 6 with the recorded propensity in every tier, except in shed answers."""
    file = tmp_path / "surfaces.toml"
    file.write_text("[plain]\nk = 7\n[drawn]\nk = 3\nexplore = { share = 0.8, position = 2, of = 6 }\n")
    async with started_world(tmp_path, surfaces_file=file) as world:
        spoil(world)
        plain = [item.item_id for item in (await world.recommend(user_id, k=None, surface="plain")).items]
        answers = [
            await world.recommend(user_id, k=None, surface="drawn", request_id=f"r{number}") for number in range(120)
        ]
        await asyncio.sleep(0)  # impressions follow their answers
        sent = [decode_impression(value) for _, value in world.impressions.records]

    lists = [[item.item_id for item in answer.items] for answer in answers]
    seen = {impression.request_id: impression for impression in sent if impression.surface == "drawn"}
    assert {answer.tier for answer in answers} == {tier}
    assert all((listed[0], len(set(listed))) == (plain[0], 3) for listed in lists)
    assert {listed[1] for listed in lists} == ({plain[1]} if spoil is shed else set(plain[1:6]))
    assert len(seen) == (0 if spoil is shed else 120)
    for impression in seen.values():
        is_first = impression.item_ids[1] == plain[1]
        assert impression.propensity == pytest.approx((1.0, 0.16 + (0.2 if is_first else 0.0), 1.0))
    assert all(impression.propensity is None for impression in sent if impression.surface == "plain")


async def test_what_was_shown_and_not_clicked_sinks(world: World) -> None:
    """Items shown without a click lose rank by their stored impression counts."""
    world.features.users["long"] = replace(user("i00", "i01", "i02", "i03"), shown={"i04": 10, "i05": 1})

    answer = await world.recommend("long", k=4, rules=Rules(decay=0.3))

    assert [item.item_id for item in answer.items] == ["i06", "i05", "i07", "i08"]


async def test_variety_comes_from_the_student_s_vectors(world: World) -> None:
    """Diversity separates items with similar vectors in every tier."""
    world.student.rows = np.eye(2, dtype=np.float32)[np.arange(20) // 10]  # i00 to i09, i10 to i19

    answer = await world.recommend("long", k=3, rules=Rules(diversity=0.9))

    assert answer.tier is Tier.LLM
    assert [int(item.item_id[1:]) // 10 for item in answer.items][:2] == [0, 1]


async def test_the_llm_ranks_as_many_as_it_has_beams_for(world: World) -> None:
    """With rules the LLM ranks as many candidates as it has beams; without rules, the compared items."""
    await world.recommend("long", k=3)
    await world.recommend("long", k=3, rules=Rules(diversity=0.1))

    assert [request.k for request in world.llm.requests] == [10, 16]


async def test_an_expression_that_leaves_few_items_reaches_the_llm_as_their_ids(world: World) -> None:
    """A filter with few matches reaches the replica as item ids, so it need not compile the expression."""
    await world.recommend("long", k=3, filters=Filters.of(EVEN), exclude_item_ids=("i06",))

    (request,) = world.llm.requests
    assert request.filters.expression is None
    assert request.filters.allowed_item_ids == tuple(f"i{index:02}" for index in range(0, 20, 2) if index != 6)


@pytest.mark.parametrize(
    "change", [{"attributes": {"price": 3.0}}, {"attributes": {"price": 30.0}}, {"available": False}]
)
async def test_an_attribute_that_changes_counts_at_once(world: World, change: dict[str, Any]) -> None:
    """A compiled mask follows each change of an item."""
    cheap = Filters(must=(Condition.of("price", Range(lt=10.0)),))
    items = world.plane.names.first.current().items
    for index in range(4, 9):
        items.put(f"i{index:02}", ItemState(item_id=f"i{index:02}", attributes={"price": 3.0}), int(NOW_S * 1_000))
    before = await world.recommend("long", filters=cheap, k=5)

    items.put("i04", ItemState(item_id="i04", **change), int(NOW_S * 1_000))
    after = await world.recommend("long", filters=cheap, k=5)

    shown = [[item.item_id for item in answer.items] for answer in (before, after)]
    is_cheap = change == {"attributes": {"price": 3.0}}
    assert shown == [["i04", "i05", "i06", "i07", "i08"], ["i04"] * is_cheap + ["i05", "i06", "i07", "i08"]]
