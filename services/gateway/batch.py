"""Batch requests: each entry is answered like a single request, under one shared deadline.

Features of users that the same bundle answers are read together. A failing entry does not fail the rest. Only a few
entries of a batch run at a time, so requests of other callers are served in between.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from services.contracts.access import Caller
from services.contracts.batch import BatchAnswer, BatchEntry
from services.contracts.features import UserFeatures
from services.contracts.recommend import Recommendation, RecommendRequest
from services.errors import DependencyUnavailable, ErrorKind, TailraceError, as_tailrace_error
from services.gateway.recommend import Recommend
from services.gateway.request.context import Features
from services.items.expression import Budget
from services.router.deadline import Arrival

log = structlog.get_logger()

_AT_A_TIME = 32
_ITEMS_AT_A_TIME = 1_000
"""Maximum items wanted by the running entries together; one turn of the event loop then takes only a few
milliseconds."""
_RETRY_AFTER_S = 0.5
Refused = Callable[[str, str, str, str, str], None]
"""Called with the door, the error code, its summary, the entry's id and its tenant."""


class RecommendBatch:
    """Answers the entries of a batch."""

    def __init__(self, recommend: Recommend, features: Features, refused: Refused) -> None:
        self._recommend = recommend
        self._features = features
        self._refused = refused

    async def __call__(
        self, entries: Sequence[BatchEntry], arrival: Arrival, door: str, caller: Caller
    ) -> list[BatchAnswer]:
        """Answer every entry, in order. Never raises: an entry's error is its answer."""
        requests = [entry.request for entry in entries if isinstance(entry.request, RecommendRequest)]
        features = ReadTogether(self._features, self._by_version(requests))
        longest, budget = max(map(_size, requests), default=1), Budget()
        places = asyncio.Semaphore(min(_AT_A_TIME, max(1, _ITEMS_AT_A_TIME // longest)))

        async def answer(request: RecommendRequest) -> Recommendation:
            async with places:
                return await self._recommend(request, arrival, door, caller, features, budget)

        async def outcome(entry: BatchEntry) -> Recommendation | TailraceError:
            if not isinstance(entry.request, RecommendRequest):
                return self._failed(entry.request, door, entry.request_id, caller)
            try:
                return await answer(entry.request)
            except Exception as error:  # noqa: BLE001 - a failing entry must not fail the batch
                return self._failed(error, door, entry.request_id, caller)

        answering = []
        for entry in entries:
            answering.append(asyncio.create_task(outcome(entry)))
            await asyncio.sleep(0)  # tasks created together would all start in one turn of the loop
        outcomes = await asyncio.gather(*answering)
        return [BatchAnswer(entry.request_id, answer) for entry, answer in zip(entries, outcomes, strict=True)]

    def _by_version(self, requests: Sequence[RecommendRequest]) -> Mapping[str, Sequence[str]]:
        """Return the users by the version of the stored lists they read; skips users whose request will be refused."""
        users: dict[str, dict[str, None]] = {}
        for request in requests:
            if request.user_id is not None:
                with suppress(TailraceError):
                    users.setdefault(self._recommend.lists_version_for(request), {})[request.user_id] = None
        return {version: tuple(of_version) for version, of_version in users.items()}

    def _failed(self, error: Exception, door: str, request_id: str, caller: Caller) -> TailraceError:
        failure = as_tailrace_error(error)
        if failure.kind is ErrorKind.INTERNAL:
            log.error("unexpected_error", request_id=request_id, door=door, exc_info=error)
        self._refused(door, failure.kind.value, failure.summary, request_id, caller.tenant)
        return failure


def _size(request: RecommendRequest) -> int:
    """Return the number of wanted items plus a quarter of the named items, which cost less."""
    named = len(request.exclude_item_ids) + len(request.recent_item_ids) + len(request.filters.allowed_item_ids or ())
    return request.num_items + named // 4


class ReadTogether:
    """Features of the users of one batch, read in one exchange per list version on the first read."""

    def __init__(self, store: Features, users_by_version: Mapping[str, Sequence[str]]) -> None:
        self._store = store
        self._users = users_by_version
        self._reading: dict[str, asyncio.Task[Mapping[str, UserFeatures]]] = {}

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return a user's features; see Features.

        Reads separately if another bundle has been assigned to the user meanwhile.
        """
        if user_id not in self._users.get(bundle_version, ()):
            return await self._store.read(user_id, bundle_version, timeout_s)
        reading = self._reading.get(bundle_version)
        if reading is None:
            users = self._users[bundle_version]
            reading = asyncio.create_task(self._store.read_many(users, bundle_version, timeout_s))
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._reading[bundle_version] = reading
        features = await asyncio.shield(reading)
        if user_id not in features:
            raise DependencyUnavailable("features", _RETRY_AFTER_S)
        return features[user_id]

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        return await self._store.read_many(user_ids, bundle_version, timeout_s)
