"""Operations on items of the live catalogue: each change is a topic record, done when the broker acknowledges it.

All processes apply it from there within a second. Knows neither JSON nor protobuf: a draft is a
mapping of the fields that the caller sent.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from services.contracts.items import MAX_ITEMS_PER_REQUEST, ItemOutcome, ItemState, item_from
from services.contracts.message import check_id
from services.contracts.tenant import DEFAULT_TENANT, prefix_of
from services.errors import DependencyUnavailable, InvalidRequest, NotFound
from services.gateway.events.record import EventLog
from services.gateway.overload.long_work import LongWork
from services.items.layout import ItemLayout
from services.items.live_items import Knowledge, LiveItems

ItemDraft = Mapping[str, Any]
"""One item's fields, parsed but not yet checked."""

LoadNames = Callable[[str, float], AsyncIterator[None]]
"""See `Names.load_each`."""

_CATCH_UP_S = 2.0
_LOAD_S = 2.0
_RETRY_AFTER_S = 1.0
_START_TIMEOUT_S = 15.0
_FEW = 8
"""Up to this many drafts are checked in the event loop."""


class ItemReader(Protocol):
    """Brings the live catalogue up to date with the topic."""

    def start(self, timeout_s: float) -> None:
        """Start, and wait up to `timeout_s` until the topic has been read to its end. Blocks."""
        ...

    def stop(self) -> None:
        """Stop. Blocks for a moment."""
        ...

    async def catch_up(self, timeout_s: float) -> None:
        """Return when the topic has been read to its current end. Raises DependencyUnavailable."""
        ...


class ItemOperations:
    """Puts, patches, reads and deletes items."""

    def __init__(self, log: EventLog, reader: ItemReader, items: LiveItems, load_names: LoadNames) -> None:
        """`log` and `reader` are the topic's producer and reader; the reader and loaded names fill `items`."""
        self._log = log
        self._reader = reader
        self._items = items
        self._load_names = load_names
        self._tenant = DEFAULT_TENANT
        self._patching = asyncio.Lock()
        self._checking = LongWork("items")

    def of(self, tenant: str) -> "ItemOperations":
        """Return the operations on a tenant's items, by the ids that its callers know."""
        own = copy.copy(self)  # shares the producer, the reader and the lock
        own._tenant, own._items = tenant, self._items.of(tenant)
        return own

    @property
    def knowledge(self) -> Knowledge:
        """How much is known of the item states."""
        return self._items.knowledge

    async def start(self) -> None:
        """Start following the topic, and wait until it has been read to its end, unless no broker answers."""
        await asyncio.to_thread(self._reader.start, _START_TIMEOUT_S)

    async def stop(self) -> None:
        await asyncio.to_thread(self._reader.stop)

    async def put(self, drafts: Sequence[tuple[str, ItemDraft]]) -> tuple[ItemOutcome, ...]:
        """Replace whole states, (item id, fields); the last of an id wins. Invalid entries are refused individually.

        Raises InvalidRequest for too many entries or if all are invalid, DependencyUnavailable or Overloaded if the
        broker has not acknowledged the valid ones.
        """
        _check_num_items(len(drafts))
        checked = await self._checking.run_if(len(drafts) > _FEW, _check_all, drafts)
        names: set[tuple[str, str]] = set()
        states = [self._with_names_checked(index, state, names) for index, state in enumerate(checked)]
        _refuse_without_accepted(states)
        await self._record([(state.key, state.encode()) for state in states if isinstance(state, ItemState)])
        return tuple(
            ItemOutcome.of(item_id, state if isinstance(state, InvalidRequest) else None)
            for (item_id, _), state in zip(drafts, states, strict=True)
        )

    async def put_one(self, item_id: str, draft: ItemDraft) -> ItemState:
        """Replace one item's state. Raises InvalidRequest, DependencyUnavailable or Overloaded."""
        state = item_from(item_id, draft)
        self._items.layout.check_names(state, set())
        await self._record([(state.key, state.encode())])
        return state

    async def patch(self, item_id: str, changes: ItemDraft) -> ItemState:
        """Merge changes into the state of an item, and return the merged state.

        Reads the topic to its current end first. Concurrent patches at one gateway are serialized; at different
        gateways, the later record wins and reverts fields that the other patch changed within the same milliseconds.

        Raises NotFound, InvalidRequest, DependencyUnavailable or Overloaded.
        """
        check_id("item_id", item_id)
        if self._items.find(_state_of(item_id)) is None:  # other patches do not wait for its names
            await self._reader.catch_up(_CATCH_UP_S)
            await self._find(item_id, _state_of(item_id))
        async with self._patching:
            await self._reader.catch_up(_CATCH_UP_S)
            before = await self._find(item_id, _state_of(item_id))
            state = before.patched(changes)
            self._items.layout.check_names(state, set())
            await self._record([(state.key, state.encode())])
        return state

    async def get(self, item_id: str) -> ItemState:
        """Return an item as it appears in answers. Raises NotFound, InvalidRequest or DependencyUnavailable."""
        check_id("item_id", item_id)
        return await self._find(item_id, lambda layout: layout.shown_state(item_id))

    async def delete(self, item_ids: Sequence[str]) -> None:
        """Delete items, known or not; an unknown item is excluded from later bundles too.

        Raises InvalidRequest, DependencyUnavailable or Overloaded.
        """
        _check_num_items(len(item_ids))
        for index, item_id in enumerate(item_ids):
            check_id("item_id" if len(item_ids) == 1 else f"item_ids[{index}]", item_id)
        await self._record([(item_id.encode(), None) for item_id in item_ids])

    async def _find(self, item_id: str, read: Callable[[ItemLayout], ItemState | None]) -> ItemState:
        """Return a state. Before an item counts as unknown, the tenant's names are loaded and its states read.

        Raises NotFound or DependencyUnavailable.
        """
        state = self._items.find(read)
        if state is None and not self._items.is_deleted(item_id):
            async for _ in self._load_names(self._tenant, _LOAD_S):
                if (state := self._items.find(read)) is not None:
                    break
            else:
                if self.knowledge is not Knowledge.CURRENT:
                    raise DependencyUnavailable("states of items", _RETRY_AFTER_S)
        if state is None:
            raise NotFound(f"there is no item {item_id!r:.100}", "put it first, or look whether it was deleted")
        return state

    def _with_names_checked(
        self, index: int, state: ItemState | InvalidRequest, names: set[tuple[str, str]]
    ) -> ItemState | InvalidRequest:
        """Return the state, or a refusal if its attributes exceed the name limit.

        `names` collects the request's new names.
        """
        try:
            if isinstance(state, ItemState):
                self._items.layout.check_names(state, names)
        except InvalidRequest as error:
            return _at(index, error)
        return state

    async def _record(self, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        prefix = prefix_of(self._tenant).encode()
        if records:
            await self._log.record([(prefix + key, value) for key, value in records])


def _state_of(item_id: str) -> Callable[[ItemLayout], ItemState | None]:
    return lambda layout: layout.state(item_id)


def _check_num_items(num_items: int) -> None:
    if not num_items:
        raise InvalidRequest("items", "empty", "send at least one item")
    if num_items > MAX_ITEMS_PER_REQUEST:
        raise InvalidRequest("items", f"{num_items} entries", f"send at most {MAX_ITEMS_PER_REQUEST} per request")


def _check_all(drafts: Sequence[tuple[str, ItemDraft]]) -> list[ItemState | InvalidRequest]:
    return [_checked(index, item_id, draft) for index, (item_id, draft) in enumerate(drafts)]


def _refuse_without_accepted(states: Sequence[ItemState | InvalidRequest]) -> None:
    """Raise the first refusal if every entry is refused."""
    first = states[0]
    if isinstance(first, InvalidRequest) and all(isinstance(state, InvalidRequest) for state in states):
        more = f" (none of {len(states)} entries is accepted)" if len(states) > 1 else ""
        raise InvalidRequest(first.field, first.problem + more, first.fix)


def _at(index: int, error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(f"items[{index}].{error.field}", error.problem, error.fix)


def _checked(index: int, item_id: str, draft: ItemDraft) -> ItemState | InvalidRequest:
    try:
        return item_from(item_id, draft)
    except InvalidRequest as error:
        return _at(index, error)
