"""Many users a call: each entry is answered as if it came alone, under one deadline; their features are read together.

An entry that fails does not fail the others. Only some of a call's entries are in the works at a time, so that other callers' requests get their turns between them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from services.contracts.access import Caller
from services.contracts.batch import BatchAnswer, BatchEntry
from services.contracts.features import UserFeatures
from services.contracts.recommend import Recommendation, RecommendRequest
from services.errors import DependencyUnavailable, ErrorKind, TailraceError, as_tailrace_error
from services.gateway.recommend import Recommend
from services.gateway.request.context import Features
from services.router.deadline import Arrival

log = structlog.get_logger()

_AT_A_TIME = 32
_RETRY_AFTER_S = 0.5


class RecommendBatch:
    """Answers the entries of a call."""

    def __init__(self, recommend: Recommend, features: Features, refused: Callable[[str, str, str, str], None]) -> None:
        """Take the parts; `refused` is called with the door, the error's code, its summary and the entry's id."""
        self._recommend = recommend
        self._features = features
        self._refused = refused

    async def __call__(
        self, entries: Sequence[BatchEntry], arrival: Arrival, door: str, caller: Caller
    ) -> list[BatchAnswer]:
        """Answer every entry, in order. Raises nothing: an entry's error is its answer."""
        requests = [entry.request for entry in entries if isinstance(entry.request, RecommendRequest)]
        features = ReadTogether(self._features, [one.user_id for one in requests if one.user_id is not None])
        places = asyncio.Semaphore(_AT_A_TIME)

        async def answer(request: RecommendRequest) -> Recommendation:
            async with places:
                return await self._recommend(request, arrival, door, caller, features)

        async def outcome(entry: BatchEntry) -> Recommendation | TailraceError:
            if not isinstance(entry.request, RecommendRequest):
                return self._failed(entry.request, door, entry.request_id)
            try:
                return await answer(entry.request)
            except Exception as error:  # noqa: BLE001 - whatever one entry fails at, the others are answered
                return self._failed(error, door, entry.request_id)

        outcomes = await asyncio.gather(*(outcome(entry) for entry in entries))
        return [BatchAnswer(entry.request_id, one) for entry, one in zip(entries, outcomes, strict=True)]

    def _failed(self, error: Exception, door: str, request_id: str) -> TailraceError:
        failure = as_tailrace_error(error)
        if failure.kind is ErrorKind.INTERNAL:
            log.error("unexpected_error", request_id=request_id, door=door, exc_info=error)
        self._refused(door, failure.kind.value, failure.summary, request_id)
        return failure


class ReadTogether:
    """The features of one call's users, read in one exchange when the first of them is asked for."""

    def __init__(self, store: Features, user_ids: Sequence[str]) -> None:
        self._store = store
        self._user_ids = tuple(dict.fromkeys(user_ids))
        self._reading: tuple[str, asyncio.Task[Mapping[str, UserFeatures]]] | None = None

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return a user's features; see Features. A bundle that goes live between two entries is read for by itself."""
        if self._reading is None:
            reading = asyncio.create_task(self._store.read_many(self._user_ids, bundle_version, timeout_s))
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._reading = bundle_version, reading
        version, reading = self._reading
        if version != bundle_version:
            return await self._store.read(user_id, bundle_version, timeout_s)
        found = await asyncio.shield(reading)
        if user_id not in found:
            raise DependencyUnavailable("features", _RETRY_AFTER_S)
        return found[user_id]

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        """See Features."""
        return await self._store.read_many(user_ids, bundle_version, timeout_s)
