"""Reads features at request time: the features of Feast's feature service, in one exchange with Redis.

The same exchange reads, after the rows, whether the store holds all rows of the user's partition, so in an emptied
store no user looks unknown. Only the reader enforces the caller's timeout: a read ends within it, with features or with
DependencyUnavailable, also when redis-py ignores its cancellation. Constructed and used in one process on one event
loop (the Redis client is bound to the loop of its first read). Feast's registry is read once at construction, never on
the request path.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq
from opentelemetry.trace import SpanKind

from services.contracts.features import RecentPopularity, UserFeatures
from services.contracts.tenant import tenant_of
from services.errors import DependencyUnavailable
from services.features.layout import RowLayout, entities_of, key_prefix
from services.features.ownership import KEY, whole_field
from services.features.redis_calls import LoopStalled, redis_as_dependency, within
from services.features.repo import RepoAddress, project_of, served_features
from services.features.schema import (
    BUNDLE_VERSION,
    POPULARITY,
    SERVICE,
    USER_HISTORY,
    USER_ID,
    USER_RECOMMENDATIONS,
    USER_SHOWN,
    WINDOW_MS,
    PopularRow,
    user_features,
)
from services.observability.tracing import span
from services.router.breaker import Breaker

T = TypeVar("T")
_RETRY_AFTER_S = 0.5
_MIN_WAIT_S = 0.01
"""A shorter wait without a reply is not a failure: short deadlines must not open the breaker for all callers."""
_MAX_FAILURES, _OPEN_S = 3, 0.1
_HOUR_MS = 3_600_000
_KEYS_PER_SCAN = 500
_MAX_SCANS = 20
_REDIS_SPAN = {"db.system.name": "redis", "db.operation.name": "HMGET"}


class FeatureReader:
    """Reads the feature store for the gateway."""

    def __init__(self, address: RepoAddress, num_partitions: int) -> None:
        """Open the store without connecting. Raises EnvironmentFault when no features were applied."""
        from services.settings.redis_clients import open_async_redis

        served, project = served_features(address, SERVICE), project_of(address)
        self._client = open_async_redis(address.redis, address.socket_timeout_s)
        self._project = project
        self._num_partitions = num_partitions
        self._popularity = RowLayout(POPULARITY, project)
        self._histories = RowLayout(USER_HISTORY, project)
        self._lists = RowLayout(USER_RECOMMENDATIONS, project)
        self._shown = RowLayout(USER_SHOWN, project)
        self._of_history, self._of_list = served[USER_HISTORY.name], served[USER_RECOMMENDATIONS.name]
        self._of_shown = served[USER_SHOWN.name]
        self._history_fields = [*self._histories.fields_of(self._of_history), *self._shown.fields_of(self._of_shown)]
        self._list_fields = [self._lists.time_field, *self._lists.fields_of(self._of_list)]
        self._breaker = Breaker(_MAX_FAILURES, _OPEN_S)

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return a user's features with this bundle's stored list, within `timeout_s`.

        Empty for an unknown user. Raises DependencyUnavailable, also while the store lacks rows of the user's
        partition.
        """
        features = await self.read_many((user_id,), bundle_version, timeout_s)
        if user_id not in features:
            raise DependencyUnavailable("features", _RETRY_AFTER_S)
        return features[user_id]

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> dict[str, UserFeatures]:
        """Return the features of these users by id, in one exchange, without users in incomplete partitions.

        Raises DependencyUnavailable.
        """
        cells = await self._gated(self._read_rows(user_ids, bundle_version), timeout_s)
        return {
            user_id: self._features(history, listed, bundle_version)
            for user_id, (history, listed, whole) in zip(user_ids, zip(*[iter(cells)] * 3, strict=True), strict=True)
            if whole == b"1"
        }

    def _features(self, history: Sequence[Any], listed: Sequence[Any], bundle_version: str) -> UserFeatures:
        num_of_history = len(self._of_history)
        row = self._histories.values(self._of_history, history[:num_of_history])
        row |= self._shown.values(self._of_shown, history[num_of_history:])  # one entity's views are in one hash
        row |= self._lists.values(self._of_list, listed[1:])
        return user_features(row | {BUNDLE_VERSION.name: bundle_version}, listed_at_s=self._lists.time_s(listed[0]))

    async def read_popular(self, timeout_s: float) -> RecentPopularity:
        """Return items by recent popularity, over all partitions; empty before the first events.

        Windows that the worker last wrote longer ago than their own length are skipped. Raises DependencyUnavailable.
        """
        rows = await self._gated(self._read_windows(), timeout_s)
        return merge_popularity(rows, now_ms=time.time_ns() // 1_000_000)

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        """Return some of the default tenant's user ids that the store holds; for the console, not for requests.

        Raises DependencyUnavailable.
        """
        with redis_as_dependency(_RETRY_AFTER_S):
            return await within(timeout_s, self._sample_user_ids(limit))

    async def close(self) -> None:
        await self._client.aclose()

    async def _read_rows(self, user_ids: Sequence[str], bundle_version: str) -> Any:
        """Return for each user three consecutive cells: the fields of both rows, and whether the partition is whole.

        Raises Redis' errors.
        """
        async with self._client.pipeline(transaction=False) as pipe:
            for user_id in user_ids:
                pipe.hmget(self._histories.key(user_id), self._history_fields)
                pipe.hmget(self._lists.key(user_id, bundle_version), self._list_fields)
                pipe.hget(KEY, whole_field(user_id, self._num_partitions))
            return await pipe.execute()

    async def _read_windows(self) -> list[PopularRow]:
        """Return the popularity of all partitions that the store has. Raises Redis' errors."""
        partitions = [str(number) for number in range(self._num_partitions)]
        async with self._client.pipeline(transaction=False) as pipe:
            for partition in partitions:
                pipe.hmget(self._popularity.key(partition), self._popularity.fields)
            replies = await pipe.execute()
        rows = (self._popularity.row(partition, cells) for partition, cells in zip(partitions, replies, strict=True))
        return [row for row in rows if row is not None]

    async def _sample_user_ids(self, limit: int) -> list[str]:
        """Return at most `limit` user ids, scanning at most ten thousand keys. Raises Redis' errors."""
        prefix = key_prefix(USER_ID.name)
        user_ids: list[str] = []
        cursor = 0
        for _ in range(_MAX_SCANS):
            cursor, keys = await self._client.scan(cursor, match=prefix + b"*", count=_KEYS_PER_SCAN)
            scanned = (entities_of(key, self._project)[USER_ID.name] for key in keys)
            user_ids += [user_id for user_id in scanned if not tenant_of(user_id)]
            if cursor == 0 or len(user_ids) >= limit:
                break
        return user_ids[:limit]

    async def _gated(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Await a read within `timeout_s`, unless the breaker is open. Raises DependencyUnavailable."""
        started_s = time.monotonic()
        if not self._breaker.allows(started_s):
            call.close()
            raise DependencyUnavailable("features", _RETRY_AFTER_S)
        number = self._breaker.started(started_s)
        try:
            with redis_as_dependency(_RETRY_AFTER_S), span("HMGET", SpanKind.CLIENT, _REDIS_SPAN):
                result = await within(timeout_s, call)
        except asyncio.CancelledError:  # the caller has cancelled, which does not mean that the store failed
            self._breaker.abandoned(number)
            raise
        except BaseException as error:
            if _means_nothing(error.__cause__, timeout_s):
                self._breaker.abandoned(number)
            else:
                self._breaker.failed(time.monotonic())
            raise
        self._breaker.succeeded()
        return result


def _means_nothing(cause: BaseException | None, timeout_s: float) -> bool:
    """Return whether a timeout has another cause than the store: too little time for the read, or a late event loop."""
    return isinstance(cause, LoopStalled) or (isinstance(cause, TimeoutError) and timeout_s < _MIN_WAIT_S)


def merge_popularity(rows: Iterable[PopularRow], now_ms: int) -> RecentPopularity:
    """Sum the partitions' windows; ties are by item id. An item's weight sums its events per hour over all windows.

    So an event of the last hour counts 168 times as much as an event of the last week. Windows that were last updated
    longer ago than their own length are skipped. Pure.
    """
    windows: dict[str, dict[str, float]] = {name: defaultdict(float) for name in WINDOW_MS}
    weights: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, window in row.windows.items():
            if now_ms - row.as_of_ms < WINDOW_MS[name]:
                weight = _HOUR_MS / WINDOW_MS[name]
                for item_id, count in zip(window.item_ids, window.counts, strict=True):
                    windows[name][item_id] += count
                    weights[item_id] += count * weight
    return RecentPopularity(_best_first(weights), {name: _best_first(counts) for name, counts in windows.items()})


def _best_first(scores: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))


def read_event_times(table: Path, user_id: str) -> dict[int, int]:
    """Return the Unix ms of the user's nth event by n (from 1), from the offline table user_history, if it exists.

    For the console, never for requests: it blocks on disk.
    """
    if not table.exists():
        return {}
    rows = pq.read_table(table, columns=["num_events", "newest_event_time_ms"], filters=[("user_id", "=", user_id)])
    first: dict[int, int] = {}  # a row after a dislike has as many events as the previous row
    for number, time_ms in zip(rows["num_events"].to_pylist(), rows["newest_event_time_ms"].to_pylist(), strict=True):
        first.setdefault(number, time_ms)
    return first
