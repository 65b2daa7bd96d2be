"""Popularity mixes the prior with recent windows; answers from memory equal those of the masks, or there is none."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.contracts.recommend import RecommendRequest, ScoredItem, Tier
from services.errors import DependencyAway
from services.gateway.request.candidates import ItemRanking, as_items, best_allowed, choose, masks_for
from services.gateway.tiers.popular import PopularRanking, rank_by_popularity
from tests.unit.gateway.world import NUM_ITEMS, World, catalogue_of, publish


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
    """A refresh replaces the ranking and the formatted items at once; a failed one leaves the last windows in use."""
    popular, live = world.plane.popular, world.plane.live.current()
    request = RecommendRequest(request_id="r", user_id="u", k=1)

    def first() -> tuple[int, str]:
        """Return the most popular item, by the ranking and from memory."""
        items = popular.items_from_memory(request, live)
        assert items is not None
        return popular.ranking("v1", live.catalogue).order[0], items[0].item_id

    before = first()
    world.features.popular = [("i19", 1.0)]
    await popular.refresh()
    refreshed = first()
    world.features.error = DependencyAway("features", 1.0)
    await popular.refresh()

    assert (before, refreshed) == ((0, "i00"), (19, "i19"))
    assert first() == refreshed


async def test_after_a_swap_the_ranking_is_the_new_bundles(world: World) -> None:
    """The ranking has the new catalogue's indices, with the same windows."""
    world.features.popular = [("i03", 9.0)]
    await world.plane.popular.refresh()

    ranking = world.plane.popular.ranking("v2", catalogue_of(5))

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

    await world.plane.popular.stop()
    monkeypatch.setattr("services.gateway.tiers.popular.rank_by_popularity", rank)
    older = asyncio.create_task(world.plane.popular.refresh())
    await asyncio.to_thread(entered.wait, 10.0)
    world.features.popular = [("i19", 1.0)]
    newer = asyncio.create_task(world.plane.popular.refresh())
    await asyncio.wait({newer}, timeout=0.05)
    held.set()
    await asyncio.gather(older, newer)

    assert world.plane.popular.ranking("v1", world.plane.live.current().catalogue).order[0] == 19


async def test_no_request_ranks_all_items_around_a_swap(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a million items that takes 0.1 s: the loading thread does it, and requests of the bundle before keep theirs."""
    ranked_in: list[threading.Thread] = []

    def rank(*args: Any) -> PopularRanking:
        """Rank; record the thread."""
        ranked_in.append(threading.current_thread())
        return rank_by_popularity(*args)

    popular, before = world.plane.popular, world.plane.live.current()
    monkeypatch.setattr("services.gateway.tiers.popular.rank_by_popularity", rank)
    publish(tmp_path / "bundles", "v2", catalogue_of(5))
    await world.plane.live.refresh()
    after = world.plane.live.current()

    rankings = [popular.ranking(live.version, live.catalogue) for live in (after, before, after)]

    assert [(ranking.version, len(ranking.order)) for ranking in rankings] == [("v2", 5), ("v1", NUM_ITEMS), ("v2", 5)]
    assert ranked_in
    assert threading.current_thread() not in ranked_in


item_ids = st.lists(st.sampled_from([*(f"i{index:02}" for index in range(NUM_ITEMS)), "gone"]), max_size=8)


def with_masks(world: World, request: RecommendRequest) -> tuple[ScoredItem, ...]:
    """Return the items by masks over the whole catalogue and the popular ranking, as for a request that is not shed."""
    live = world.plane.live.current()
    masks = masks_for(request, request.recent_item_ids, live.catalogue)
    popular = world.plane.popular.ranking(live.version, live.catalogue)
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
    popular, live = world.plane.popular, world.plane.live.current()
    popular.items_from_memory(RecommendRequest(request_id="r", user_id="u", k=before), live)

    items = popular.items_from_memory(request, live)

    if k + len({*recent, *excluded}) <= NUM_ITEMS:
        assert items is not None
    assert items in (None, with_masks(world, request))
