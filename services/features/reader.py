"""Reads features at request time: one Feast read per request, with the freshness checks that Feast leaves out.

The reader alone enforces the caller's timeout: a read ends within it, with features or with DependencyAway, also when redis-py
ignores its cancellation. Constructed and used in one process on one event loop (the Redis client is bound to the loop of its
first read). The registry is read once at construction, never on the request path.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow.parquet as pq
from opentelemetry.trace import SpanKind

from services.contracts.features import UserFeatures
from services.errors import DependencyAway
from services.features.ownership import Wholeness
from services.features.redis_calls import redis_as_dependency, within
from services.features.repo import RepoAddress, open_store
from services.features.schema import (
    BUNDLE_VERSION,
    PARTITION_ID,
    POPULARITY,
    SERVICE,
    USER_ID,
    USER_RECOMMENDATIONS,
    WINDOW_MS,
    PopularRow,
    user_features,
)
from services.observability.tracing import span
from services.router.breaker import Breaker

if TYPE_CHECKING:
    from feast import FeatureStore

T = TypeVar("T")
_RETRY_AFTER_S = 0.5
_MIN_WAIT_S = 0.01
"""A shorter wait without a reply is no failure: callers with short deadlines must not open the breaker for the others."""
_MAX_FAILURES, _OPEN_S = 3, 0.1
_HOUR_MS = 3_600_000
_KEYS_PER_SCAN = 500
_MAX_SCANS = 20
_REDIS_SPAN = {"db.system.name": "redis", "db.operation.name": "HMGET"}


class FeatureReader:
    """Reads the feature store for the gateway."""

    def __init__(self, address: RepoAddress, num_partitions: int) -> None:
        """Open the store; no connection is made yet. Raises EnvironmentFault when no features were applied."""
        self._store = open_store(address)
        self._service = self._store.get_feature_service(SERVICE, allow_cache=True)
        self._partitions = [{PARTITION_ID.name: str(number)} for number in range(num_partitions)]
        self._wholeness = Wholeness(num_partitions)
        self._breaker = Breaker(_MAX_FAILURES, _OPEN_S)

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return a user's features with the list that this bundle made, within `timeout_s`.

        Those of an unknown user are empty. Raises DependencyAway, also while the store lacks rows of the user's partition.
        """
        response, row = await self._gated(self._read_row(user_id, bundle_version), timeout_s)
        if row is None:
            raise DependencyAway("features", _RETRY_AFTER_S)
        return user_features(row, listed_at_s=_row_time_s(response, USER_RECOMMENDATIONS.features[0].name))

    async def read_popular(self, timeout_s: float) -> list[tuple[str, float]]:
        """Return items by recent popularity, best first, over all partitions; empty before the first events.

        Windows that the worker last wrote longer ago than their own length are left out. Raises DependencyAway.
        """
        response = await self._gated(
            self._store.get_online_features_async(POPULARITY.references, self._partitions), timeout_s
        )
        return merge_popularity(POPULARITY.from_columns(response.to_dict()), now_ms=time.time_ns() // 1_000_000)

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        """Return some user ids that the store holds; for the console, not for requests. Raises DependencyAway."""
        with redis_as_dependency(_RETRY_AFTER_S):
            return await within(timeout_s, _sample_user_ids(self._store, limit))

    async def close(self) -> None:
        """Close the connections."""
        client = getattr(self._store.provider.online_store, "_client_async", None)  # Feast's own close leaves it open
        if client is not None:
            await client.aclose()

    async def _read_row(self, user_id: str, bundle_version: str) -> tuple[Any, dict[str, Any] | None]:
        """Return Feast's response and a user's row; None instead of the row while the store is not whole. Raises Redis' errors."""
        entity = {USER_ID.name: user_id, BUNDLE_VERSION.name: bundle_version}
        response = await self._store.get_online_features_async(self._service, [entity])
        row = {name: values[0] for name, values in response.to_dict().items()}
        client = await _async_client(self._store)
        is_whole = await self._wholeness.holds(client, user_id, has_row=row["row_time_us"] is not None)
        return response, row if is_whole else None

    async def _gated(self, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Await a read within `timeout_s`, unless the breaker is open. Raises DependencyAway."""
        started_s = time.monotonic()
        if not self._breaker.allows(started_s):
            call.close()
            raise DependencyAway("features", _RETRY_AFTER_S)
        number = self._breaker.started(started_s)
        try:
            with redis_as_dependency(_RETRY_AFTER_S), span("HMGET", SpanKind.CLIENT, _REDIS_SPAN):
                found = await within(timeout_s, call)
        except asyncio.CancelledError:  # the caller is gone, which is no sign that the store failed
            self._breaker.abandoned(number)
            raise
        except BaseException as error:
            now_s = time.monotonic()
            if isinstance(error.__cause__, TimeoutError) and _means_nothing(now_s - started_s, timeout_s):
                self._breaker.abandoned(number)
            else:
                self._breaker.failed(now_s)
            raise
        self._breaker.succeeded()
        return found


async def _async_client(store: "FeatureStore") -> Any:
    """Return the Redis client that Feast reads with. Feast has no public way to it."""
    online: Any = store.provider.online_store
    return await online._get_client_async(store.config.online_store)


def _means_nothing(waited_s: float, timeout_s: float) -> bool:
    """Whether a timeout is no sign that the store failed: the read had too little time, or this event loop was blocked meanwhile."""
    return min(timeout_s, waited_s) < _MIN_WAIT_S or waited_s > timeout_s + _MIN_WAIT_S


def _row_time_s(response: Any, feature: str) -> int | None:
    """Return the time (Unix seconds) of the row that this feature of the only entity comes from."""
    names = list(response.proto.metadata.feature_names.val)
    return int(response.proto.results[names.index(feature)].event_timestamps[0].seconds) or None


def merge_popularity(rows: Iterable[PopularRow], now_ms: int) -> list[tuple[str, float]]:
    """Return (item id, score), best first, ties by item id. The score sums the item's events per hour over all windows.

    So an event of the last hour counts 168 times as much as one of the last week. A window that was last brought up to date longer ago
    than its own length is left out. Pure.
    """
    scores: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, window in row.windows.items():
            if now_ms - row.as_of_ms < WINDOW_MS[name]:
                weight = _HOUR_MS / WINDOW_MS[name]
                for item_id, count in zip(window.item_ids, window.counts, strict=True):
                    scores[item_id] += count * weight
    return sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))


async def _sample_user_ids(store: "FeatureStore", limit: int) -> list[str]:
    """Return at most `limit` user ids, looking at ten thousand keys at most. Raises Redis' errors.

    Relies on how Feast writes a key: the entity's name, then its value, then the project.
    """
    from feast.infra.key_encoding_utils import serialize_entity_key_prefix

    client = await _async_client(store)
    prefix = serialize_entity_key_prefix([USER_ID.name], entity_key_serialization_version=3)
    user_ids: list[str] = []
    cursor = 0
    for _ in range(_MAX_SCANS):
        cursor, keys = await client.scan(cursor, match=prefix + b"*", count=_KEYS_PER_SCAN)
        user_ids += [_user_id(key, store.project) for key in keys]
        if cursor == 0 or len(user_ids) >= limit:
            break
    return user_ids[:limit]


def _user_id(key: bytes, project: str) -> str:
    from feast.infra.key_encoding_utils import deserialize_entity_key

    entity: Any = deserialize_entity_key(key.removesuffix(project.encode()))
    user_id: str = entity.entity_values[0].string_val
    return user_id


def read_event_times(table: Path, user_id: str) -> dict[int, int]:
    """Return the Unix ms of the user's nth event, by n (from 1), from the offline table of user_history; empty without one.

    For the console, never for requests: it blocks for the disk.
    """
    if not table.exists():
        return {}
    rows = pq.read_table(table, columns=["num_events", "newest_event_time_ms"], filters=[("user_id", "=", user_id)])
    first: dict[int, int] = {}  # a row after a dislike has as many events as the one before it
    for number, time_ms in zip(rows["num_events"].to_pylist(), rows["newest_event_time_ms"].to_pylist(), strict=True):
        first.setdefault(number, time_ms)
    return first
