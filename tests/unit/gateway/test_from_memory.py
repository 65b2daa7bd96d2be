"""What is given from memory is what the whole way would give; where that is not certain, nothing is given."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.contracts.recommend import Filters, RecommendRequest, ScoredItem, Tier
from services.gateway.request.candidates import ItemRanking, as_items, best_allowed, choose, masks_for
from tests.unit.gateway.world import NUM_ITEMS, World

item_ids = st.lists(st.sampled_from([*(f"i{index:02}" for index in range(NUM_ITEMS)), "gone"]), max_size=8)


def the_long_way(world: World, request: RecommendRequest) -> tuple[ScoredItem, ...]:
    """Masks over the whole catalogue, then the popular ranking, as a request goes that nobody sheds."""
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
async def test_items_are_those_of_the_long_way(
    world: World, k: int, recent: list[str], excluded: list[str], exclude_seen: bool, before: int
) -> None:
    """Whatever is excluded and whatever was asked before: the same items and scores, or None."""
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
    assert items in (None, the_long_way(world, request))


async def test_filters_need_a_closer_look(world: World) -> None:
    """Memory holds nothing by category."""
    request = RecommendRequest(request_id="r", user_id="u", k=3, filters=Filters(categories=("odd",)))

    assert world.popular.items_from_memory(request, world.live.current()) is None


async def test_a_new_ranking_is_seen_at_once(world: World) -> None:
    """The head is remade as soon as popularity has been refreshed."""
    popular, live = world.popular, world.live.current()
    request = RecommendRequest(request_id="r", user_id="u", k=1)
    before = popular.items_from_memory(request, live)
    world.features.popular = [("i19", 1.0)]
    await world.popular.refresh()

    after = popular.items_from_memory(request, live)

    assert before is not None
    assert after is not None
    assert (before[0].item_id, after[0].item_id) == ("i00", "i19")
