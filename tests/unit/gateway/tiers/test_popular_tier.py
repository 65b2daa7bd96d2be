"""Popularity mixes the prior with recent windows; answers from memory equal those of the masks, or there is none."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.contracts.recommend import RecommendRequest, ScoredItem, Tier
from services.errors import DependencyAway
from services.gateway.request.candidates import ItemRanking, as_items, best_allowed, choose, masks_for
from services.gateway.tiers.popular import PopularRanking, rank_by_popularity
from tests.unit.gateway.world import NUM_ITEMS, World, catalogue_of


@pytest.mark.parametrize(
    ("prior", "windows", "order"),
    [
        ([4.0, 3.0, 2.0, 1.0], [], [0, 1, 2, 3]),
        ([4.0, 3.0, 2.0, 1.0], [("i03", 5.0), ("gone", 100.0), ("i02", -3.0)], [3, 0, 1, 2]),
        ([0.0, 0.0, 0.0, 0.0], [], [0, 1, 2, 3]),
    ],
)
def test_recent_popularity_is_added_to_the_prior_by_share(
    prior: list[float], windows: list[tuple[str, float]], order: list[int]
) -> None:
    """Ties rank by index; unknown items, negative weights and a prior of zeros are harmless."""
    ranking = rank_by_popularity("v1", replace(catalogue_of(4), popularity=np.array(prior)), windows)

    assert ranking.order.tolist() == order
    assert np.all(np.diff(ranking.scores) <= 0)


async def test_windows_are_refreshed_and_kept_during_an_outage(world: World) -> None:
    """A failed refresh leaves the last windows in use."""
    catalogue = world.live.current().catalogue
    world.features.popular = [("i19", 1.0)]
    await world.popular.refresh()
    refreshed = world.popular.ranking("v1", catalogue).order[0]
    world.features.error = DependencyAway("features", 1.0)
    await world.popular.refresh()

    assert refreshed == 19
    assert world.popular.ranking("v1", catalogue).order[0] == 19


async def test_after_a_swap_the_ranking_is_the_new_bundles(world: World) -> None:
    """The ranking has the new catalogue's indices, with the same windows."""
    world.features.popular = [("i03", 9.0)]
    await world.popular.refresh()

    ranking = world.popular.ranking("v2", catalogue_of(5))

    assert ranking.version == "v2"
    assert sorted(ranking.order.tolist()) == [0, 1, 2, 3, 4]
    assert ranking.order[0] == 3


async def test_a_slow_refresh_never_overwrites_a_newer_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two concurrent refreshes, the newer windows rank although the first is delayed in its thread."""
    held, entered = threading.Event(), threading.Event()

    def rank(*args: Any) -> PopularRanking:
        """Rank; block the first call until it is released."""
        if not entered.is_set():
            entered.set()
            held.wait(10.0)
        return rank_by_popularity(*args)

    await world.popular.stop()
    monkeypatch.setattr("services.gateway.tiers.popular.rank_by_popularity", rank)
    older = asyncio.create_task(world.popular.refresh())
    await asyncio.to_thread(entered.wait, 10.0)
    world.features.popular = [("i19", 1.0)]
    newer = asyncio.create_task(world.popular.refresh())
    await asyncio.wait({newer}, timeout=0.05)
    held.set()
    await asyncio.gather(older, newer)

    assert world.popular.ranking("v1", world.live.current().catalogue).order[0] == 19


item_ids = st.lists(st.sampled_from([*(f"i{index:02}" for index in range(NUM_ITEMS)), "gone"]), max_size=8)


def with_masks(world: World, request: RecommendRequest) -> tuple[ScoredItem, ...]:
    """Return the items by masks over the whole catalogue and the popular ranking, as for a request that is not shed."""
    live = world.live.current()
    masks = masks_for(request, request.recent_item_ids, live.catalogue)
    popular = world.popular.ranking(live.version, live.catalogue)
    best = best_allowed(popular.order, popular.scores, masks.showable, NUM_ITEMS)
    return as_items(choose([ItemRanking(Tier.POPULAR, *best)], masks.showable, request.k), live.catalogue)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    k=st.integers(1, 2 * NUM_ITEMS),
    recent=item_ids,
    excluded=item_ids,
    exclude_seen=st.booleans(),
    before=st.integers(1, NUM_ITEMS),
)
async def test_items_from_memory_are_those_of_the_masks(
    world: World, k: int, recent: list[str], excluded: list[str], exclude_seen: bool, before: int
) -> None:
    """For any exclusions and any earlier request: the same items and scores, or None."""
    request = RecommendRequest(
        request_id="r",
        user_id="u",
        k=k,
        recent_item_ids=tuple(recent),
        exclude_item_ids=tuple(excluded),
        exclude_seen=exclude_seen,
    )
    popular, live = world.popular, world.live.current()
    popular.items_from_memory(RecommendRequest(request_id="r", user_id="u", k=before), live)

    items = popular.items_from_memory(request, live)

    if k + len({*recent, *excluded}) <= NUM_ITEMS:
        assert items is not None
    assert items in (None, with_masks(world, request))


async def test_a_new_ranking_is_seen_at_once(world: World) -> None:
    """A refresh replaces the formatted items at once."""
    popular, live = world.popular, world.live.current()
    request = RecommendRequest(request_id="r", user_id="u", k=1)
    before = popular.items_from_memory(request, live)
    world.features.popular = [("i19", 1.0)]
    await world.popular.refresh()

    after = popular.items_from_memory(request, live)

    assert before is not None
    assert after is not None
    assert (before[0].item_id, after[0].item_id) == ("i00", "i19")
