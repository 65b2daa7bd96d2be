"""Reads features at request time: one Feast read per request, with the freshness checks that Feast leaves out.

The reader alone enforces the caller's timeout: a read ends within it, with features or with DependencyAway, also when redis-py
ignores its cancellation. Constructed and used in one process on one event loop (the Redis client is bound to the loop of its
first read). The registry is read once at construction, never on the request path.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.trace import SpanKind

from services.contracts.features import PrecomputedList, UserFeatures
from services.errors import DependencyAway
from services.features.popular import merge_popularity
from services.features.redis_calls import redis_as_dependency, within
from services.features.repo import RepoAddress, open_store
from services.features.rows import WINDOW_MS, PopularRow, PopularWindow
from services.features.sampling import sample_user_ids
from services.observability.tracing import span
from services.router.breaker import Breaker

SERVICE = "recommend_v1"
_POPULAR_FEATURES = [
    "popularity:as_of_ms",
    *(f"popularity:{column}_{window}" for window in WINDOW_MS for column in ("item_ids", "counts")),
]
_RETRY_AFTER_S = 0.5
_MIN_WAIT_S = 0.01
"""A shorter wait without a reply is no failure: callers with short deadlines must not open the breaker for the others."""
_MAX_FAILURES, _OPEN_S = 3, 0.1
_REDIS_SPAN = {"db.system.name": "redis", "db.operation.name": "HMGET"}


class FeatureReader:
    """The gateway's view of the feature store."""

    def __init__(self, address: RepoAddress, num_partitions: int) -> None:
        """Open the store; no connection is made yet. Raises EnvironmentFault when no features were applied."""
        self._store = open_store(address)
        self._service = self._store.get_feature_service(SERVICE, allow_cache=True)
        self._partitions = [{"partition_id": str(number)} for number in range(num_partitions)]
        self._breaker = Breaker(_MAX_FAILURES, _OPEN_S)

    async def read(self, user_id: str, timeout_s: float) -> UserFeatures:
        """Return a user's features within `timeout_s`; those of an unknown user are empty. Raises DependencyAway."""
        response = await self._read(self._service, [{"user_id": user_id}], timeout_s)
        row = {name: values[0] for name, values in response.to_dict().items()}
        return _user_features({**row, "made_at_s": _time_of(response, "recommended_item_ids")})

    async def read_popular(self, timeout_s: float) -> list[tuple[str, float]]:
        """Return items by recent popularity, best first, over all partitions; empty before the first events.

        Windows that have slid past their own length since the worker last wrote them are left out. Raises DependencyAway.
        """
        columns = (await self._read(list(_POPULAR_FEATURES), self._partitions, timeout_s)).to_dict()
        rows = [_popular_row(columns, index) for index in range(len(self._partitions))]
        return merge_popularity([row for row in rows if row is not None], now_ms=time.time_ns() // 1_000_000)

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        """Return some user ids that the store holds; for people who look, not for requests. Raises DependencyAway."""
        with redis_as_dependency(_RETRY_AFTER_S):
            return await within(timeout_s, sample_user_ids(self._store, limit))

    async def close(self) -> None:
        """Close the connections."""
        client = getattr(self._store.provider.online_store, "_client_async", None)  # Feast's own close leaves it open
        if client is not None:
            await client.aclose()

    async def _read(self, features: Any, entities: Sequence[dict[str, str]], timeout_s: float) -> Any:
        """Read in one exchange, within `timeout_s`. Raises DependencyAway."""
        started_s = time.monotonic()
        if not self._breaker.allows(started_s):
            raise DependencyAway("features", _RETRY_AFTER_S)
        number = self._breaker.started(started_s)
        try:
            with redis_as_dependency(_RETRY_AFTER_S), span("HMGET", SpanKind.CLIENT, _REDIS_SPAN):
                response = await within(timeout_s, self._store.get_online_features_async(features, list(entities)))
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
        return response


def _means_nothing(waited_s: float, timeout_s: float) -> bool:
    """Whether a timeout is no sign that the store failed: the read had too little time, or this event loop was blocked meanwhile."""
    return min(timeout_s, waited_s) < _MIN_WAIT_S or waited_s > timeout_s + _MIN_WAIT_S


def _time_of(response: Any, feature: str) -> int | None:
    """Return the time (Unix seconds) of the row that this feature of a lone entity comes from."""
    names = list(response.proto.metadata.feature_names.val)
    return int(response.proto.results[names.index(feature)].event_timestamps[0].seconds) or None


def _user_features(row: Mapping[str, Any]) -> UserFeatures:
    if not row["item_ids"]:
        return UserFeatures(precomputed=_precomputed(row))
    return UserFeatures(
        history_item_ids=tuple(row["item_ids"]),
        newest_event_time_ms=row["newest_event_time_ms"],
        num_events=row["num_events"],
        as_of_us=row["row_time_us"],
        precomputed=_precomputed(row),
    )


def _precomputed(row: Mapping[str, Any]) -> PrecomputedList | None:
    if not row["recommended_item_ids"]:
        return None
    return PrecomputedList(
        item_ids=tuple(row["recommended_item_ids"]),
        scores=tuple(row["scores"]),
        bundle_version=row["bundle_version"],
        watermark_ms=row["watermark_ms"],
        made_at_s=row["made_at_s"],
    )


def _popular_row(columns: Mapping[str, Any], index: int) -> PopularRow | None:
    if columns["as_of_ms"][index] is None:
        return None
    windows = {
        name: PopularWindow(
            tuple(columns[f"item_ids_{name}"][index] or ()), tuple(columns[f"counts_{name}"][index] or ())
        )
        for name in WINDOW_MS
    }
    return PopularRow(partition=index, as_of_ms=columns["as_of_ms"][index], windows=windows)
