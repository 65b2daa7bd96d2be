"""Operations on items of the live catalogue: each change is a topic record, done when the broker acknowledges it.

All processes apply it from there within a second. Knows neither JSON nor protobuf: a draft is a
mapping of the fields that the caller sent.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from services.contracts.items import MAX_ITEMS_PER_REQUEST, ItemOutcome, ItemPatch, ItemState, item_from
from services.contracts.message import check_id
from services.contracts.tenant import DEFAULT_TENANT, prefix_of, scoped
from services.errors import DependencyUnavailable, InvalidRequest, NotFound, RetryLater
from services.gateway.overload.long_work import LongWork
from services.items.layout import ItemLayout
from services.items.live_items import Knowledge, LiveItems
from services.items.patches import PATCH_HEADER, SETTLE_ROUNDS, PatchReader

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
_MAX_TOGETHER = 200
"""Records per part of a request; the broker has the time limit for each part."""


class ItemLog(Protocol):
    """The topic of items."""

    async def record(
        self, records: Sequence[tuple[bytes, bytes | None]], headers: Sequence[tuple[str, bytes]] = ()
    ) -> Sequence[tuple[int, int]]:
        """Return the records' partitions and offsets once all are acknowledged.

        Raises DependencyUnavailable or Overloaded.
        """
        ...


class ItemReader(PatchReader, Protocol):
    """Brings the live catalogue up to date with the topic."""

    def start(self, timeout_s: float) -> None:
        """Start, and wait up to `timeout_s` until the topic has been read to its end. Blocks."""
        ...

    async def catch_up(self, timeout_s: float) -> None:
        """Return when the topic has been read to its current end. Raises DependencyUnavailable."""
        ...

    def stop(self) -> None:
        """Stop. Blocks for a moment."""
        ...


class ItemOperations:
    """Puts, patches, reads and deletes items."""

    def __init__(self, log: ItemLog, reader: ItemReader, items: LiveItems, load_names: LoadNames) -> None:
        """`log` and `reader` are the topic's producer and reader; the reader and loaded names fill `items`."""
        self._log = log
        self._reader = reader
        self._items = items
        self._load_names = load_names
        self._tenant = DEFAULT_TENANT
        self._checking = LongWork("items")

    def of(self, tenant: str) -> "ItemOperations":
        """Return the operations on a tenant's items, by the ids that its callers know."""
        own = copy.copy(self)  # shares the producer and the reader
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

        If the broker stops acknowledging, the remaining entries are refused too.

        Raises InvalidRequest for too many entries or if all are invalid, DependencyUnavailable or Overloaded if the
        broker has acknowledged no valid entry.
        """
        _check_num_items(len(drafts))
        checked = await self._checking.run_if(len(drafts) > _FEW, _check_all, drafts)
        names: set[tuple[str, str]] = set()
        states = [self._with_names_checked(index, state, names) for index, state in enumerate(checked)]
        _refuse_without_accepted(states)
        valid = [index for index, state in enumerate(states) if isinstance(state, ItemState)]
        num_written, error = await self._record(
            [(state.key, state.encode()) for state in states if isinstance(state, ItemState)]
        )
        if error is not None and not num_written:
            raise error
        why = "" if error is None else f": {error.problem}"
        for index in valid[num_written:]:
            states[index] = InvalidRequest(f"items[{index}]", f"not acknowledged{why}", "send it again")
        return tuple(
            ItemOutcome.of(item_id, state if isinstance(state, InvalidRequest) else None)
            for (item_id, _), state in zip(drafts, states, strict=True)
        )

    async def put_one(self, item_id: str, draft: ItemDraft) -> ItemState:
        """Replace one item's state. Raises InvalidRequest, DependencyUnavailable or Overloaded."""
        state = item_from(item_id, draft)
        self._items.layout.check_names(state, set())
        await self._record_all([(state.key, state.encode())])
        return state

    async def patch(self, item_id: str, changes: ItemDraft) -> ItemState:
        """Merge changes into the state of an item, and return the merged state.

        Reads the topic to its current end first. Concurrent changes of an item through any gateway apply in the topic's
        order; see `services.items.patches`.

        Raises NotFound, InvalidRequest, DependencyUnavailable or Overloaded.
        """
        check_id("item_id", item_id)
        await self._reader.catch_up(_CATCH_UP_S)
        patch = self._reader.patch_of(changes)
        state = (await self._find(item_id, _state_of(item_id))).patched(changes)
        self._items.layout.check_names(state, set())
        if await self._restate(item_id, state, patch):
            return state
        await self._settle(item_id)
        state = await self._find(item_id, _state_of(item_id))
        state.patched(changes)  # readers refused the changes if they exceed a limit of the item now
        return state

    async def _settle(self, item_id: str) -> None:
        """Catch up, and state an item again until its last record is its state."""
        for _ in range(SETTLE_ROUNDS):
            await self._reader.catch_up(_CATCH_UP_S)
            if not self._reader.is_unsettled(scoped(self._tenant, item_id)):
                return
            patch = self._reader.patch_of({})
            if await self._restate(item_id, self._items.find(_state_of(item_id)), patch):
                return

    async def _restate(self, item_id: str, state: ItemState | None, patch: ItemPatch) -> bool:
        """Record a merged state, None for deleted; return whether no other record came since the topic was read."""
        record = scoped(self._tenant, item_id).encode(), None if state is None else state.encode()
        written = await self._log.record([record], [(PATCH_HEADER, patch.encode())])
        return all(patch.read_until.get(partition) == offset for partition, offset in written)

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
        await self._record_all([(item_id.encode(), None) for item_id in item_ids])

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

    async def _record(self, records: Sequence[tuple[bytes, bytes | None]]) -> tuple[int, RetryLater | None]:
        """Record parts in sequence; return the number of acknowledged records, and the error if some are missing."""
        prefix = prefix_of(self._tenant).encode()
        for begin in range(0, len(records), _MAX_TOGETHER):
            part = records[begin : begin + _MAX_TOGETHER]
            try:
                await self._log.record([(prefix + key, value) for key, value in part])
            except RetryLater as error:
                return begin, error
        return len(records), None

    async def _record_all(self, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        _, error = await self._record(records)
        if error is not None:
            raise error


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
