"""The operations on items of the live catalogue: each change is one record of the topic, and is done when the broker has it.

Every process takes it over from there, this one too, within a second. Knows neither JSON nor protobuf: a draft is a mapping of the fields
that the caller sent.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from services.contracts.items import MAX_ITEMS_PER_REQUEST, ItemState, item_from
from services.contracts.recommend import check_id
from services.errors import InvalidRequest, NotFound
from services.gateway.events.record import EventLog
from services.items.live_items import Knowledge, LiveItems

ItemDraft = Mapping[str, Any]
"""One item's fields, as parsed and not yet checked."""

_CATCH_UP_S = 2.0


class ItemReader(Protocol):
    """Brings the live catalogue up to date with the topic."""

    def start(self, timeout_s: float) -> None:
        """Begin, and wait for at most so long until all is known that the topic holds. Blocks."""
        ...

    def stop(self) -> None:
        """End. Blocks for a moment."""
        ...

    async def catch_up(self, timeout_s: float) -> None:
        """Return when all is known that the topic holds now. Raises DependencyUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What became of one entry of a request: None, the broker has it; or why it was refused."""

    item_id: str
    refusal: InvalidRequest | None = None


class ItemOperations:
    """Puts, patches, reads and deletes items."""

    def __init__(self, log: EventLog, reader: ItemReader, items: LiveItems, start_timeout_s: float = 15.0) -> None:
        """Take the topic's producer and reader, and what is read into."""
        self._log = log
        self._reader = reader
        self._items = items
        self._start_timeout_s = start_timeout_s
        self._patching = asyncio.Lock()

    @property
    def knowledge(self) -> Knowledge:
        """What is known of the items' states."""
        return self._items.knowledge

    async def start(self) -> None:
        """Begin to follow the topic, and wait until all is known that it holds, unless no broker answers."""
        await asyncio.to_thread(self._reader.start, self._start_timeout_s)

    async def stop(self) -> None:
        """Stop following."""
        await asyncio.to_thread(self._reader.stop)

    async def put(self, drafts: Sequence[tuple[str, ItemDraft]]) -> tuple[ItemOutcome, ...]:
        """Replace whole states, (item id, fields), the last one of an id wins. Entries that are wrong are refused each by itself.

        Raises InvalidRequest for too many entries, DependencyUnavailable or Overloaded where the broker has not acknowledged the others.
        """
        _check_num_items(len(drafts))
        names: set[tuple[str, str]] = set()
        checked = [
            _checked(f"items[{place}].", partial(self._read, item_id, draft, names))
            for place, (item_id, draft) in enumerate(drafts)
        ]
        await self._record([(one.key, one.encode()) for one in checked if isinstance(one, ItemState)])
        return tuple(
            ItemOutcome(item_id, one if isinstance(one, InvalidRequest) else None)
            for (item_id, _), one in zip(drafts, checked, strict=True)
        )

    async def put_one(self, item_id: str, draft: ItemDraft) -> ItemState:
        """Replace one item's state. Raises InvalidRequest, DependencyUnavailable or Overloaded."""
        state = self._read(item_id, draft, set())
        await self._record([(state.key, state.encode())])
        return state

    async def patch(self, item_id: str, changes: ItemDraft) -> ItemState:
        """Merge changes into what is stated of an item, and return the whole.

        What the topic holds when the call comes is read first. Of two that meet at one gateway the second builds on the first; of two at
        different gateways within milliseconds the later record wins, with the fields that the other one changed as they were before it.

        Raises NotFound, InvalidRequest, DependencyUnavailable or Overloaded.
        """
        check_id("item_id", item_id)
        async with self._patching:
            await self._reader.catch_up(_CATCH_UP_S)
            before = self._items.find(lambda layout: layout.state(item_id))
            if before is None:
                raise _no_item(item_id)
            state = before.patched(changes)
            self._items.layout.check_names(state, set())
            await self._record([(state.key, state.encode())])
        return state

    def get(self, item_id: str) -> ItemState:
        """Return an item as it stands in answers. Raises NotFound or InvalidRequest."""
        check_id("item_id", item_id)
        state = self._items.find(lambda layout: layout.shown_state(item_id))
        if state is None:
            raise _no_item(item_id)
        return state

    async def delete(self, item_ids: Sequence[str]) -> None:
        """Delete items, known or not: one of which nothing is known yet stays away from later bundles too.

        Raises InvalidRequest, DependencyUnavailable or Overloaded.
        """
        _check_num_items(len(item_ids))
        for place, item_id in enumerate(item_ids):
            check_id("item_id" if len(item_ids) == 1 else f"item_ids[{place}]", item_id)
        await self._record([(item_id.encode(), None) for item_id in item_ids])

    def _read(self, item_id: str, draft: ItemDraft, names: set[tuple[str, str]]) -> ItemState:
        """Read a draft, `names` with the request's new names of attributes. Raises InvalidRequest."""
        state = item_from(item_id, draft)
        self._items.layout.check_names(state, names)
        return state

    async def _record(self, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        if records:
            await self._log.record(records)


def _check_num_items(num_items: int) -> None:
    if not num_items:
        raise InvalidRequest("items", "empty", "send at least one item")
    if num_items > MAX_ITEMS_PER_REQUEST:
        raise InvalidRequest("items", f"{num_items} entries", f"send at most {MAX_ITEMS_PER_REQUEST} per request")


def _checked(place: str, read: Callable[[], ItemState]) -> ItemState | InvalidRequest:
    try:
        return read()
    except InvalidRequest as error:
        return InvalidRequest(f"{place}{error.field}", error.problem, error.fix)


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"there is no item {item_id!r:.100}", "put it first, or look whether it was deleted")
