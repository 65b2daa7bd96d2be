"""A hidden item is in no answer: in no tier, not when shed, and whenever it was hidden."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.access import Priority
from services.contracts.items import MAX_ITEMS_PER_REQUEST, ItemState
from services.contracts.message import convert
from services.contracts.recommend import Filters, SimilarTo, Tier
from services.errors import DependencyUnavailable
from services.gateway.overload.admission import AdmissionDecision
from services.gateway.tiers.similar import find_new
from services.items.layout import ItemLayout
from tests.support.wait import until
from tests.unit.gateway.world import VERSION, World, catalogue_of, publish, started_world, user


def state(world: World, *item_ids: str, **fields: object) -> None:
    world.items.live_items.apply((item_id, ItemState(item_id=item_id, **fields)) for item_id in item_ids)  # type: ignore[arg-type]


def hide(world: World, *item_ids: str) -> None:
    state(world, *item_ids, available=False)


@pytest.mark.parametrize(
    ("user_id", "tier"), [("listed", "precomputed"), ("long", "llm"), ("short", "student"), ("nobody", "popular")]
)
async def test_no_tier_shows_what_is_hidden(world: World, user_id: str, tier: str) -> None:
    """The tier stays the same, and the next items replace the hidden items."""
    before = [item.item_id for item in (await world.recommend(user_id, k=10)).items]
    hide(world, *before[:2])
    after = await world.recommend(user_id, k=8)

    assert after.tier == tier
    assert [item.item_id for item in after.items] == before[2:]


async def test_an_item_that_is_hidden_while_the_llm_ranks_is_not_shown(world: World) -> None:
    """An item hidden during the LLM's ranking is not shown, and the next tier fills the answer."""
    first = (await world.recommend("long")).items[0].item_id
    world.llm.gate = asyncio.Event()
    asking = asyncio.create_task(world.recommend("long"))
    await until(lambda: len(world.llm.requests) == 2)
    hide(world, first)
    world.llm.gate.set()
    answer = await asking

    assert answer.tier == Tier.LLM
    assert first not in [item.item_id for item in answer.items]
    assert len(answer.items) == 3


async def test_answers_from_memory_follow_the_live_catalogue(world: World) -> None:
    """A shed answer, formatted in advance, excludes an item hidden since then and includes it once available again."""
    world.strain(2)
    heads = []
    for available in (True, False, True):
        state(world, "i00", available=available)
        answer = await world.recommend("long", priority=Priority.LOW)
        heads.append((answer.reason, answer.items[0].item_id))

    assert world.plane.load.judge(Priority.LOW) is AdmissionDecision.SHED
    assert heads == [("shed", "i00"), ("shed", "i01"), ("shed", "i00")]


async def test_a_new_item_is_popular_once_it_is_used_and_found_by_its_category(world: World) -> None:
    """Without events, new items follow all other items, newest first; events rank them like any item."""
    state(world, "older", published_ms=1_700_000_000_000, categories=("fresh",))
    state(world, "newer", published_ms=1_750_000_000_000, categories=("fresh",), title="Newer")
    state(world, "later", published_ms=1_900_000_000_000, categories=("fresh",))
    await world.plane.popular.refresh()
    filtered = await world.recommend("nobody", filters=Filters(categories=("fresh",)))
    world.features.popular = [("newer", 1_000.0)]
    await world.plane.popular.refresh()
    first = (await world.recommend("nobody")).items[0]

    assert [item.item_id for item in filtered.items] == ["newer", "older"]
    assert (first.item_id, first.title, first.source) == ("newer", "Newer", "popular")


async def test_a_new_item_is_in_the_next_answer(world: World) -> None:
    """Before the next refresh, new items end the list, newest first, also in filtered and shed answers."""
    await world.plane.popular.refresh()
    first = [item.item_id for item in (await world.recommend("nobody", k=22)).items]
    state(world, "new 1", categories=("fresh",))
    state(world, "new 2", categories=("fresh",), published_ms=1_750_000_000_000)
    listed = [item.item_id for item in (await world.recommend("nobody", k=22)).items]
    fresh = [item.item_id for item in (await world.recommend("long", filters=Filters(categories=("fresh",)))).items]
    world.strain(2)
    shed = await world.recommend("nobody", priority=Priority.LOW, k=22)

    assert listed == [*first, "new 2", "new 1"]
    assert fresh == ["new 2", "new 1"]
    assert [item.item_id for item in shed.items] == listed


async def test_items_are_published_and_expire_on_time(world: World) -> None:
    """Items are published and expire by the clock, without a new record."""
    now_ms = int(world.items.now_s * 1_000)
    state(world, "i00", published_ms=now_ms + 1_000)
    state(world, "i01", expires_ms=now_ms + 1_000)
    shown = []
    for _ in range(2):
        world.items.live_items.act_on_time()
        shown.append([item.item_id for item in (await world.recommend("nobody", k=2)).items])
        world.items.now_s += 1.0

    assert shown == [["i01", "i02"], ["i00", "i02"]]


async def test_a_bundle_that_is_published_later_honours_the_live_catalogue(tmp_path: Path, world: World) -> None:
    """An item hidden before stays hidden in the next bundle, and a new item that the bundle has gets its title."""
    hide(world, "i00")
    state(world, "i22", categories=("fresh",))
    publish(tmp_path / "bundles", "v2", catalogue_of(24))
    await world.plane.names.first.refresh()
    answer = await world.recommend("nobody", k=3)
    filtered = await world.recommend("nobody", filters=Filters(categories=("fresh",)))

    assert (answer.bundle_version, [item.item_id for item in answer.items]) == ("v2", ["i01", "i02", "i03"])
    assert [(item.item_id, item.title) for item in filtered.items] == [("i22", "Item 22")]


@pytest.mark.parametrize(("under", "tier"), [(VERSION, "precomputed"), ("another", "llm")])
async def test_lists_of_the_bundle_to_which_only_items_were_added_stay_in_use(
    tmp_path: Path, under: str, tier: str
) -> None:
    """Lists of the bundle named by the manifest stay valid, unless the manifest was copied from another bundle."""
    async with started_world(tmp_path, about={"lists": {"of": "v0", "under": under}}) as world:
        items = tuple(f"i{index:02}" for index in range(5, 17))
        world.features.users["old"] = user("i00", "i01", "i02", listed=items, bundle_version="v0")
        answer = await world.recommend("old")

    assert answer.tier == tier


async def similar_to(world: World, *item_ids: str, k: int = 4) -> list[str]:
    """Request similar items and return their ids."""
    answer = await world.recommend(None, k=k, subject=SimilarTo(item_ids))
    return [item.item_id for item in answer.items]


async def test_a_new_item_has_neighbours_by_its_words_and_is_one(world: World) -> None:
    """A new item and its neighbours match by the cosine of their words; hidden items are excluded."""
    state(world, "n1", title="Item 12", categories=("even", "Tea"))
    state(world, "n2", title="Item 12", categories=("even", "Tea"))
    before = await similar_to(world, "n1", k=1)
    await world.plane.similar.refresh()
    of_new, of_known = await similar_to(world, "n1"), await similar_to(world, "i12", k=5)
    cart = await similar_to(world, "n1", "i12")
    hide(world, "n2")
    after = await similar_to(world, "n1")

    assert before == ["i00"]
    assert of_new[:2] == ["n2", "i12"]
    assert set(of_new[2:]) <= {f"i{number:02}" for number in range(0, 20, 2)}
    assert of_known[0] == "i13"
    assert {"n1", "n2"} < set(of_known)
    assert "n2" in cart
    assert not {"n1", "i12"} & set(cart)
    assert after == [item for item in of_new if item != "n2"] + after[3:]


async def test_new_words_of_a_new_item_are_taken_up(world: World) -> None:
    """A new item with changed words has other neighbours after the next refresh."""
    state(world, "n1", title="Item 12", categories=("even",))
    await world.plane.similar.refresh()
    state(world, "n1", title="Item 13", categories=("odd",))
    await world.plane.similar.refresh()

    assert (await similar_to(world, "n1", k=1)) == ["i13"]


class CountingLayout(ItemLayout):
    """A layout that counts its reads of titles."""

    num_read = 0

    def title(self, index: int) -> str:
        """Return an item's title."""
        self.num_read += 1
        return super().title(index)


async def test_a_put_of_many_items_tells_which_the_broker_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that stops acknowledging refuses the remaining entries; if it has none, the request is refused."""
    record, num_parts = world.items.record, iter(range(3))

    async def failing(*sent: Any) -> Any:
        if next(num_parts) == 2:
            world.items.error = DependencyUnavailable("items", 1.0)
        return await record(*sent)

    monkeypatch.setattr(world.items, "record", failing)
    drafts: list[tuple[str, dict[str, Any]]] = [(f"n{number}", {}) for number in range(MAX_ITEMS_PER_REQUEST)]
    drafts[3] = ("n3", {"value": "dear"})
    outcomes = await world.plane.items.put(drafts)
    errors = {outcome.item_id: outcome.error.field for outcome in outcomes if outcome.error is not None}
    written = {key.decode() for key, _ in world.items.records}
    monkeypatch.undo()
    with pytest.raises(DependencyUnavailable):
        await world.plane.items.put(drafts)

    assert 200 < len(written) < MAX_ITEMS_PER_REQUEST
    assert written == {item_id for item_id, _ in drafts} - errors.keys()
    assert errors["n3"] == "items[3].value"
    assert errors["n999"] == "items[999]"


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["n1", "n2", "n3", "i03"]),
        st.none()
        | st.builds(
            dict,
            title=st.sampled_from([None, "Item 12", "Item 13 red"]),
            categories=st.sampled_from([None, ("even",), ("odd", "Tea")]),
            available=st.booleans(),
            value=st.sampled_from([None, 1.0, 2.0]),
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(CHANGES)
def test_texts_of_new_items_are_composed_where_their_words_changed_alone(changes: list[tuple[str, Any]]) -> None:
    """After each change the result equals a fresh search; unless a new item's words changed, no text is read."""
    layout, new = CountingLayout(catalogue_of()), None
    words: dict[str, object] = {}
    for item_id, fields in changes:
        layout.put(item_id, None if fields is None else ItemState(item_id=item_id, **fields), now_ms=0)
        now = (None, None) if fields is None else (fields["title"], fields["categories"] or None)
        is_changed = item_id.startswith("n") and (item_id not in words or words[item_id] != now)
        words[item_id] = now
        layout.num_read = 0
        new = find_new(layout, new)
        num_read = layout.num_read
        fresh = find_new(layout, None)

        assert is_changed or num_read == 0 or new is None
        assert (new is None) == (fresh is None)
        if new is not None and fresh is not None:
            assert (new.texts, new.near, new.known_near) == (fresh.texts, fresh.near, fresh.known_near)


@pytest.mark.parametrize("num_new", [20, 150])
def test_one_changed_title_is_searched_by_itself(num_new: int) -> None:
    """A changed title needs two searches, plus one per full list that it leaves; the result equals a fresh search."""
    layout = ItemLayout(catalogue_of())
    for number in range(num_new):
        title = f"Item {number % 12} {'tea' if number % 2 else 'cup'}"
        layout.put(f"n{number}", ItemState(item_id=f"n{number}", title=title, categories=("even",)), now_ms=0)
    new = find_new(layout, None)
    for number, title in ((3, "Nothing of the kind"), (3, "Item 3 tea"), (4, "Item 4 cup pot")):
        before = new
        layout.put(f"n{number}", ItemState(item_id=f"n{number}", title=title, categories=("even",)), now_ms=0)
        new, fresh = find_new(layout, before), find_new(layout, None)

        assert before is not None
        assert new is not None
        assert fresh is not None
        assert (new.near, new.known_near, new.new_near) == (fresh.near, fresh.known_near, fresh.new_near)
        left = sum(
            len(row) == 100 and any(layout.item_id(i) == f"n{number}" for i, _ in row)
            for row in before.new_near.values()
        )
        assert new.num_searched <= 2 + left
        assert fresh.num_searched == 2 * num_new


async def test_an_expression_that_lets_new_items_through_is_answered_by_what_knows_the_others(world: World) -> None:
    """A replica gets the ids in its bundle; if none match, no model is called."""
    state(world, "n1", attributes={"fit": 1.0})
    state(world, "i05", attributes={"fit": 1.0})
    await world.plane.popular.refresh()
    fits = convert(Filters, {"must": [{"key": "fit", "eq": 1}]})
    mixed = await world.recommend("long", filters=fits, k=2)
    (sent,) = world.llm.requests
    hide(world, "i05")
    alone = await world.recommend("long", filters=fits, k=2)

    assert sent.filters.allowed_item_ids == ("i05",)
    assert [(item.item_id, item.source) for item in mixed.items] == [("i05", "llm"), ("n1", "popular")]
    assert (alone.tier, alone.reason, [item.item_id for item in alone.items]) == ("popular", "not_trained", ["n1"])
    assert len(world.llm.requests) == 1
