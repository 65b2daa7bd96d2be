"""Ten-line fakes of the ports: they answer at once unless a test sets a delay or an error."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from models.mixer import Added
from models.wishes.reading import Reading, ReadTerms
from models.wishes.vocabulary import WishItem
from services.contracts.engine_load import EngineLoad
from services.contracts.erasure import ErasureProgress, ErasureStore
from services.contracts.features import RecentPopularity, UserFeatures
from services.contracts.items import ItemPatch
from services.contracts.rank import RankRequest, RankResult
from services.errors import DeadlineExceeded, DependencyUnavailable
from services.items.live_items import LiveItems
from services.items.patches import PatchMerger


class FakeFeatures:
    """Users in a dict, popularity in a list; raises `error`, sleeps `delay_s` first."""

    def __init__(self, users: dict[str, UserFeatures] | None = None) -> None:
        self.users = users or {}
        self.popular: list[tuple[str, float]] = []
        self.windows: dict[str, list[tuple[str, float]]] = {}
        self.error: BaseException | None = None
        self.delay_s = 0.0
        self.read_together: list[tuple[str, ...]] = []

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return the user's features with the list of this bundle, within the timeout."""
        await asyncio.sleep(min(self.delay_s, timeout_s))
        if self.delay_s > timeout_s:
            raise DependencyUnavailable("features", 0.5)
        if self.error is not None:
            raise self.error
        features = self.users.get(user_id, UserFeatures())
        if features.precomputed is not None and features.precomputed.bundle_version != bundle_version:
            return replace(features, precomputed=None)
        return features

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        """Return the features of these users, and record the joint read."""
        self.read_together.append(tuple(user_ids))
        return {user_id: await self.read(user_id, bundle_version, timeout_s) for user_id in user_ids}

    async def read_popular(self, timeout_s: float) -> RecentPopularity:
        """Return the popularity windows."""
        if self.error is not None:
            raise self.error
        return RecentPopularity(self.popular, self.windows)


class FakeLlm:
    """Ranks by a fixed order of item IDs, with exclusions and allowed items.

    Waits for `gate` first, if any, and sleeps `delay_s`; then raises `error`.
    """

    def __init__(self, order: Sequence[str], version: str) -> None:
        self.order = order
        self.version = version
        self.error: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.delay_s = 0.0
        self.requests: list[RankRequest] = []
        self.names: Sequence[str] = ()

    def replicas(self) -> Sequence[str]:
        """Return the replicas' names."""
        return self.names

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank, within the timeout."""
        self.requests.append(request)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(min(self.delay_s, timeout_s))
        if self.delay_s > timeout_s:
            raise DeadlineExceeded("llm")
        if self.error is not None:
            raise self.error
        allowed = request.filters.allowed_item_ids or self.order
        shown = [i for i in self.order if i in allowed and i not in request.excluded_item_ids][: request.k]
        return RankResult(
            item_ids=tuple(shown),
            scores=tuple(-float(position) for position in range(len(shown))),
            bundle_version=self.version,
            num_prompt_tokens=1,
            num_cached_tokens=0,
            queue_ms=0.0,
            compute_ms=0.0,
            load=EngineLoad(num_running=0, num_waiting=0, kv_cache_usage=0.0),
        )


class FakeStudent:
    """Ranks the items of `order` (catalogue indices) first, then the last items of the catalogue; raises `error`."""

    def __init__(self) -> None:
        self.order: Sequence[int] = ()
        self.rows: np.ndarray | None = None
        self.error: BaseException | None = None

    def vectors(self, items: np.ndarray) -> np.ndarray | None:
        return None if self.rows is None else self.rows[items]

    def rank(
        self, history: Sequence[int], allowed: np.ndarray, k: int, added: Added | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rank."""
        if self.error is not None:
            raise self.error
        if added is not None:
            return added.best(np.zeros(len(allowed)), allowed, k)
        ordered = dict.fromkeys((*self.order, *range(len(allowed) - 1, -1, -1)))
        indices = np.array([index for index in ordered if allowed[index]], dtype=np.int64)[:k]
        return indices, indices.astype(float)


class FakeReader:
    """Reads every wish as `reading`; raises `error`, blocks until `gate` is set first, and lists what it was given."""

    def __init__(self) -> None:
        self.reading = Reading(ReadTerms(reader="fake"))
        self.error: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.wishes: list[tuple[str, ...]] = []
        self.items: list[WishItem] = []

    def read(self, text: str, session_wishes: Sequence[str] = ()) -> Reading:
        """Read."""
        self.wishes.append((*session_wishes, text))
        self.gate.wait(10.0)
        if self.error is not None:
            raise self.error
        return self.reading

    def with_items(self, items: Sequence[WishItem]) -> "FakeReader":
        """Take the items."""
        self.items.extend(items)
        return self


class FakeLog:
    """Keeps records in a list; raises `error`, `is_full` drops offered records."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes, bytes | None]] = []
        self.error: BaseException | None = None
        self.is_full = False

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    async def record(self, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Keep records."""
        if self.error is not None:
            raise self.error
        self.records.extend(records)

    def offer(self, record: tuple[bytes, bytes | None], on_done: object) -> bool:
        """Keep one record, unless full."""
        if not self.is_full:
            self.records.append(record)
        return not self.is_full


class FakeItemTopic(FakeLog):
    """The items topic with its producer and reader: records apply at once, or when read if `is_behind`."""

    def __init__(self) -> None:
        super().__init__()
        self.live_items = LiveItems(lambda: self.now_s)
        self.now_s = 1_800_000_000.0
        self.is_behind = False
        self._merger = PatchMerger()
        self._headers: list[Sequence[tuple[str, bytes]]] = []
        self._num_read = 0

    def start(self, timeout_s: float = 0.0) -> None:
        """Nothing to start."""

    def patch_of(self, changes: Mapping[str, Any]) -> ItemPatch:
        """Return the header of a patch of the states that are known now."""
        return ItemPatch(dict(changes), "", {0: self._num_read})

    def is_unsettled(self, item_id: str) -> bool:
        """Return whether an item's last record is not its state."""
        return item_id in self._merger.unsettled

    async def record(
        self, records: Sequence[tuple[bytes, bytes | None]], headers: Sequence[tuple[str, bytes]] = ()
    ) -> Sequence[tuple[int, int]]:
        """Keep records, and apply them."""
        await super().record(records)
        self._headers += [headers] * len(records)
        if not self.is_behind:
            self._read()
        return [(0, len(self.records) - len(records) + number) for number in range(len(records))]

    async def catch_up(self, timeout_s: float) -> None:
        """Apply all records."""
        if self.error is not None:
            raise self.error
        self._read()

    def _read(self) -> None:
        for offset in range(self._num_read, len(self.records)):
            key, value = self.records[offset]
            record = SimpleNamespace(key=key, value=value, headers=self._headers[offset], partition=0, offset=offset)
            self.live_items.apply([self._merger.change(record, self.live_items.stated)])
        self._num_read = len(self.records)


class FakeShelf:
    """Keeps explanations in a dict; raises `error`."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.error: BaseException | None = None

    async def put(self, records: Sequence[tuple[str, bytes]], timeout_s: float) -> None:
        """Keep records."""
        if self.error is not None:
            raise self.error
        self.records.update(records)

    async def get(self, request_id: str, timeout_s: float) -> bytes | None:
        """Return one record."""
        if self.error is not None:
            raise self.error
        return self.records.get(request_id)

    async def close(self) -> None:
        """Nothing to close."""


class FakeReceipts:
    """Keeps receipts in a dict; raises `error`."""

    def __init__(self) -> None:
        self.receipts: dict[str, ErasureProgress] = {}
        self.error: BaseException | None = None

    async def open(self, erasure_id: str, accepted_ms: int, timeout_s: float) -> None:
        """Begin a receipt."""
        if self.error is not None:
            raise self.error
        stores = dict.fromkeys(ErasureStore, None)
        self.receipts[erasure_id] = ErasureProgress(erasure_id=erasure_id, accepted_time_ms=accepted_ms, stores=stores)

    async def get(self, erasure_id: str, timeout_s: float) -> ErasureProgress | None:
        """Return one receipt."""
        if self.error is not None:
            raise self.error
        return self.receipts.get(erasure_id)

    async def close(self) -> None:
        """Nothing to close."""
