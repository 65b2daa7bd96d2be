"""A replica's masks follow the live catalogue without a new mask for every change."""

import time

import numpy as np
import pytest

from services.contracts.filters import MAX_CONDITIONS, MAX_VALUES, MOST_COMPARED, Condition, OneOf, Range
from services.contracts.items import ItemState
from services.contracts.recommend import Filters
from services.errors import DeadlineExceeded, InvalidRequest
from services.items.expression import FEW_TESTS
from services.items.live_items import LiveItems
from services.llm.ranking.shown_items import ShownItems
from tests.unit.gateway.world import catalogue_of

NUM_ITEMS = 10


def hide(items: LiveItems, *item_ids: str, available: bool = False) -> None:
    items.apply((item_id, ItemState(item_id=item_id, available=available)) for item_id in item_ids)


def allowed_by(shown: ShownItems, now_s: float) -> list[int]:
    """Return the items that the engine may rank without filters."""
    mask, hidden = shown.masks(Filters(), now_s)
    allowed = np.ones(NUM_ITEMS, dtype=bool) if mask is None else mask.copy()
    allowed[hidden] = False
    return np.flatnonzero(allowed).tolist()


def test_what_is_hidden_counts_at_once_and_masks_are_kept_for_half_a_second() -> None:
    """Hidden items apply immediately; the mask is reused for half a second, so shown items wait for the next mask."""
    items = LiveItems()
    shown = ShownItems(items.lay(catalogue_of(NUM_ITEMS)))
    assert shown.masks(Filters(), 0.0) == (None, [])
    hide(items, "i03", "new")
    assert allowed_by(shown, 0.1) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert shown.masks(Filters(), 0.2) == (None, [3])
    mask, hidden = shown.masks(Filters(), 0.6)
    assert (mask is not None, hidden) == (True, [])
    hide(items, "i03", available=True)
    hide(items, "i05")
    assert allowed_by(shown, 0.7) == [0, 1, 2, 4, 6, 7, 8, 9]
    assert shown.masks(Filters(), 0.8)[0] is mask
    assert allowed_by(shown, 1.2) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_filters_meet_the_live_catalogue() -> None:
    """A filtered mask has the bundle's available items of the category, with the live categories."""
    items = LiveItems()
    shown = ShownItems(items.lay(catalogue_of(NUM_ITEMS)))
    hide(items, "i02")
    items.apply([("i03", ItemState(item_id="i03", categories=("even",)))])
    mask, hidden = shown.masks(Filters(categories=("even",)), 0.0)

    assert mask is not None
    assert (len(mask), np.flatnonzero(mask).tolist(), hidden) == (NUM_ITEMS, [0, 3, 4, 6, 8], [])


def priced(num_tests: int) -> Filters:
    """Return filters of this many tests, which match every item with a price."""
    return Filters(must=tuple(Condition.of("price", Range(gt=-n)) for n in range(1, num_tests + 1)))


def most_tests() -> Filters:
    """Return filters within the limits of one request whose tests exceed the budget of one call."""
    numbers = Condition.of("price", OneOf(tuple(map(float, range(MOST_COMPARED)))))
    num_numbers = MAX_VALUES // MOST_COMPARED
    return Filters(must=(numbers,) * num_numbers + (priced(1).must or ()) * (MAX_CONDITIONS - num_numbers))


async def test_expensive_expressions_are_compiled_in_time_and_within_a_budget() -> None:
    """More tests than a call may have are refused by field; a permitted expression is compiled before `masks`."""
    items = LiveItems()
    shown = ShownItems(items.lay(catalogue_of(NUM_ITEMS)))
    items.apply([("i03", ItemState(item_id="i03", attributes={"price": 2.0}))])
    expensive = priced(FEW_TESTS + 1)

    with pytest.raises(InvalidRequest) as refused:
        await shown.compile(most_tests(), time.monotonic() + 30)
    with pytest.raises(DeadlineExceeded):
        await shown.compile(expensive, time.monotonic() - 1)
    await shown.compile(expensive, time.monotonic() + 30)
    mask, _ = shown.masks(expensive, 0.0)

    assert refused.value.field == "filters"
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [3]
