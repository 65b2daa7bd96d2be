"""Finds items for the editor: by id, by the beginning of an id, or by words of the title, in their current state.

A catalogue may hold a million items: the search runs in steps, lets other requests run in between, and stops at the
limit.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.errors import InvalidRequest
from services.items.layout import ItemLayout

MAX_FOUND = 20
MAX_SEARCH_CHARS = 256
_STEP = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundItem:
    """One item.

    `available` is its stated availability; `is_shown` also reflects its times: whether answers may contain it now.
    """

    item_id: str
    title: str
    categories: tuple[str, ...]
    available: bool
    is_shown: bool


async def find_items(items: ItemLayout, text: str) -> list[FoundItem]:
    """Return at most MAX_FOUND items, the item with this id first. Raises InvalidRequest."""
    if not text.strip() or len(text) > MAX_SEARCH_CHARS:
        raise InvalidRequest("find", "empty or too long", f"send 1 to {MAX_SEARCH_CHARS} characters")
    matches: list[FoundItem] = []
    async for index in _matches(items, text.strip()):
        if (item := found_item(items, index)) is not None:
            matches.append(item)
        if len(matches) == MAX_FOUND:
            break
    return matches


def found_item(items: ItemLayout, index: int) -> FoundItem | None:
    """Return the item at an index; None if it is deleted."""
    state = items.shown_state(items.item_id(index))
    if state is None:
        return None
    return FoundItem(
        item_id=state.item_id,
        title=state.title or state.item_id,
        categories=state.categories or (),
        available=state.available,
        is_shown=bool(items.columns.available[index]),
    )


async def _matches(items: ItemLayout, text: str) -> AsyncIterator[int]:
    exact, folded = items.index(text), text.casefold()
    if exact is not None:
        yield exact
    for first in range(0, items.num_named, _STEP):
        for index in range(first, min(first + _STEP, items.num_named)):
            if index != exact and (items.item_id(index).startswith(text) or folded in items.title(index).casefold()):
                yield index
        await asyncio.sleep(0)
