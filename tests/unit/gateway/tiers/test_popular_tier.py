"""Popularity smooths recent windows by the prior; answers from memory equal the masks' answers or are None."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.catalogue import Catalogue
from services.contracts.recommend import RecommendRequest, ScoredItem, Tier
from services.errors import DependencyUnavailable
from services.features.reader import merge_popularity
from services.features.schema import LogPosition, PopularRow
from services.gateway.ranking import ItemRanking, as_items, best_allowed, choose
from services.gateway.request.masks import masks_for
from services.gateway.tiers.popular import PopularRanking, rank_by_popularity
from services.items.live_items import LiveItems
from services.stream.aggregate import LoggedEvent
from services.stream.popularity import ListedItems, PopularityCounter
from tests.unit.gateway.world import NUM_ITEMS, World, catalogue_of, publish

NOW_MS = 1_790_000_000_000


@pytest.mark.parametrize(
    ("prior", "windows", "order"),
    [
        ([4.0, 3.0, 2.0, 1.0], [], [0, 1, 2, 3]),
        ([4.0, 3.0, 2.0, 1.0], [("i03", 5.0), ("gone", 100.0), ("i02", -3.0)], [3, 0, 1, 2]),
        ([400.0, 300.0, 200.0, 100.0], [("i03", 13.0)], [0, 1, 3, 2]),
        ([0.0, 0.0, 0.0, 0.0], [], [0, 1, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0], [("i02", 1.0)], [2, 0, 1, 3]),
    ],
)
def test_recent_popularity_is_smoothed_by_the_prior(
    prior: list[float], windows: list[tuple[str, float]], order: list[int]
) -> None:
    """The prior's top item counts as at most 50 recent events; unknown items and negative weights are ignored."""
    ranking = rank_by_popularity("v1", LiveItems().lay(replace(catalogue_of(4), popularity=np.array(prior))), windows)

    assert ranking.order.tolist() == order
    assert np.all(np.diff(ranking.scores) <= 0)


def listed_after(num_users: int, item: int, waited_ms: int, old: Catalogue) -> list[int]:
    """Return the first items of an old data set, some time after users touched one item."""
    counts = PopularityCounter(ListedItems(old.item_ids))
    for number in range(num_users):
        position = LogPosition("t", 0, number)
        counts.add(LoggedEvent(f"u{number}", old.item_ids[item], f"e{number}", NOW_MS * 1_000, position, "click", 1.0))
    now_ms = NOW_MS + waited_ms
    row = PopularRow(partition=0, as_of_ms=now_ms, windows=counts.top(now_ms, 200))
    recent = merge_popularity([row], now_ms)
    return rank_by_popularity("v1", LiveItems().lay(old), recent.weights).order[:10].tolist()


@pytest.mark.parametrize("steepness", [0.3, 1.0])
def test_a_fresh_event_does_not_lead_an_old_data_set_and_a_burst_does(steepness: float) -> None:
    """A single event leaves the leader unchanged; 50 users within an hour make an unused item lead for that hour."""
    old = replace(catalogue_of(300), popularity=np.round(20_000 / np.arange(1.0, 301.0) ** steepness))
    old.popularity[299] = 0.0

    assert {listed_after(1, item, 0, old)[0] for item in range(0, 300, 23)} == {0}
    assert listed_after(1, 299, 0, old) == list(range(10))
    assert listed_after(50, 299, 0, old)[0] == 299
    assert listed_after(50, 299, 3 * 3_600_000, old)[0] == 0


async def test_windows_are_refreshed_and_kept_during_an_outage(world: World) -> None:
    """A refresh replaces ranking and formatted items together; after a failed refresh the last windows stay in use."""
    popular, live = world.plane.popular, world.plane.names.first.current()
    request = RecommendRequest(request_id="r", user_id="u", k=1)

    def first() -> tuple[int, str]:
        """Return the most popular item, by the ranking and from memory."""
        items = popular.items_from_memory(request, live)
        assert items is not None
        return popular.ranking(live).order[0], items[0].item_id

    before = first()
    world.features.popular = [("i03", 100.0)]
    await popular.refresh()
    refreshed = first()
    world.features.error = DependencyUnavailable("features", 1.0)
    await popular.refresh()

    swapped = popular.ranking(replace(live, version="v2", items=LiveItems().lay(catalogue_of(5))))
    assert (before, refreshed, first()) == ((0, "i00"), (3, "i03"), (3, "i03"))
    assert (swapped.version, swapped.order[0], sorted(swapped.order.tolist())) == ("v2", 3, [0, 1, 2, 3, 4])


async def test_a_slow_refresh_never_overwrites_a_newer_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two concurrent refreshes the newer windows win, even if the older refresh finishes later."""
    held, entered = threading.Event(), threading.Event()

    def rank(*args: Any) -> PopularRanking:
        """Rank, and hold the first thread."""
        if not entered.is_set():
            entered.set()
            held.wait(10.0)
        return rank_by_popularity(*args)

    await world.plane.popular.stop()
    monkeypatch.setattr("services.gateway.tiers.popular.rank_by_popularity", rank)
    older = asyncio.create_task(world.plane.popular.refresh())
    await asyncio.to_thread(entered.wait, 10.0)
    world.features.popular = [("i19", 100.0)]
    newer = asyncio.create_task(world.plane.popular.refresh())
    await asyncio.wait({newer}, timeout=0.05)
    held.set()
    await asyncio.gather(older, newer)

    assert world.plane.popular.ranking(world.plane.names.first.current()).order[0] == 19


async def test_no_request_ranks_all_items_around_a_swap(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loading thread ranks all items, not a request, and the previous bundle's requests keep their ranking."""
    ranked_in: list[threading.Thread] = []

    def rank(*args: Any) -> PopularRanking:
        """Rank, and record the thread."""
        ranked_in.append(threading.current_thread())
        return rank_by_popularity(*args)

    popular, before = world.plane.popular, world.plane.names.first.current()
    monkeypatch.setattr("services.gateway.tiers.popular.rank_by_popularity", rank)
    publish(tmp_path / "bundles", "v2", catalogue_of(5))
    await world.plane.names.first.refresh()
    after = world.plane.names.first.current()

    rankings = [popular.ranking(live) for live in (after, before, after)]

    assert [(ranking.version, len(ranking.order)) for ranking in rankings] == [("v2", 5), ("v1", NUM_ITEMS), ("v2", 5)]
    assert ranked_in
    assert threading.current_thread() not in ranked_in


item_ids = st.lists(st.sampled_from([*(f"i{index:02}" for index in range(NUM_ITEMS)), "gone"]), max_size=8)


def with_masks(world: World, request: RecommendRequest) -> tuple[ScoredItem, ...]:
    """Return the items by masks over the whole catalogue and the popular ranking, as for a request that is not shed."""
    live = world.plane.names.first.current()
    masks = masks_for(request, request.recent_item_ids, live.items)
    popular = world.plane.popular.ranking(live)
    best = best_allowed(popular.order, popular.scores, masks.showable, NUM_ITEMS)
    chosen = choose([ItemRanking(Tier.POPULAR, *best)], masks.showable, request.k, live.items.columns.available)
    return as_items(chosen, live.items)


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
    """For any exclusions and any earlier request, the items and scores are equal, or None."""
    request = RecommendRequest(
        request_id="r",
        user_id="u",
        k=k,
        recent_item_ids=tuple(recent),
        exclude_item_ids=tuple(excluded),
        exclude_seen=exclude_seen,
    )
    popular, live = world.plane.popular, world.plane.names.first.current()
    popular.items_from_memory(RecommendRequest(request_id="r", user_id="u", k=before), live)

    items = popular.items_from_memory(request, live)

    if k + len({*recent, *excluded}) <= NUM_ITEMS:
        assert items is not None
    assert items in (None, with_masks(world, request))
