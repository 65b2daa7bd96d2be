"""Ranks a sample of answered requests again, by a release candidate or by the LLM, and compares the two lists.

A second ranking is an ordinary request through `Recommend`, with the features of the first ranking and low priority:
the same masks, rules and policy apply, and it yields to other traffic as low-priority requests do. Each process runs
one at a time, and only with spare capacity; other sampled requests are skipped and counted. The result is never shown,
sent or recorded, except for the overlap of the two lists. Does not know how a candidate is loaded.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import structlog
from prometheus_client import Counter, Histogram

from services.contracts.access import Priority
from services.contracts.features import UserFeatures
from services.contracts.recommend import Reason, Recommendation, Tier
from services.contracts.tenant import DEFAULT_TENANT
from services.gateway.overload.monitor import LoadMonitor
from services.gateway.recommend import BundleFinder, Recommend, SurfaceFinder
from services.gateway.records.answer import AnswerRecord, AnswerSink, RoutingRecord
from services.gateway.records.rank_overlap import rank_biased_overlap
from services.gateway.request.live_bundle import Live
from services.gateway.surfaces.surface import Surface
from services.router.deadline import Arrival

log = structlog.get_logger()

_DOOR = "shadow"
_PAUSE_S = 0.01
"""Pause after an answer is built, while it is formatted and sent."""
_LLM_FIRST = Surface(tiers=frozenset({Tier.LLM, Tier.STUDENT, Tier.POPULAR}))
"""No stored lists; the student answers only if the LLM fails, so the answer carries the reason."""
_OF_THE_MOMENT = frozenset(
    {
        Reason.LLM_OVERLOADED,
        Reason.LLM_TOO_SLOW,
        Reason.LLM_LATE,
        Reason.LLM_UNAVAILABLE,
        Reason.LLM_FAILED,
        Reason.BUNDLE_MISMATCH,
        Reason.MODEL_LOADING,
        Reason.STUDENT_FAILED,
        Reason.SHED,
    }
)
"""Transient reasons: such a list does not represent the models behind it."""


class RecommendBy(Protocol):
    """Builds the ordinary request path with the given bundle, surfaces and sinks."""

    def __call__(self, *, names: BundleFinder, surfaces: SurfaceFinder, sinks: Sequence[AnswerSink]) -> Recommend: ...


class SecondRanker(Protocol):
    """A ranker for second rankings."""

    @property
    def by(self) -> str:
        """Name in metrics."""
        ...

    @property
    def share(self) -> float:
        """Fraction (0 to 1) of answers that are sampled."""
        ...

    @property
    def agreement(self) -> Histogram:
        """Histogram of the overlap by model name, tier of the answer, and bundle of the second ranking."""
        ...

    def bundle_for(self, record: AnswerRecord, routing: RoutingRecord) -> Live | None:
        """Return the bundle to rank with; None if there is nothing to compare."""
        ...

    def recommend(self, live: Live, routing: RoutingRecord) -> Recommend:
        """Return the request path."""
        ...

    def deadline_ms(self, routing: RoutingRecord) -> int: ...

    def flaw(self, shown: Recommendation, answer: Recommendation) -> Reason | None:
        """Return the reason why the two lists cannot be compared; None if they can."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRanker:
    """The candidate of a release, as it would answer the same request.

    `beside` returns the candidate loaded alongside a live bundle, or None.
    """

    share: float
    agreement: Histogram
    beside: Callable[[Live], Live | None]
    recommend_by: RecommendBy
    by: str = "candidate"

    def bundle_for(self, record: AnswerRecord, routing: RoutingRecord) -> Live | None:
        return self.beside(routing.context.live)

    def recommend(self, live: Live, routing: RoutingRecord) -> Recommend:
        """Return the ordinary path on a surface with the same tiers.

        The request already contains the rest of the surface.
        """
        return self.recommend_by(
            names=_One(live), surfaces=_Only(Surface(tiers=routing.context.surface.tiers)), sinks=()
        )

    def deadline_ms(self, routing: RoutingRecord) -> int:
        """Return the request's own deadline, which also affects the tier."""
        return routing.context.deadline.total_ms

    def flaw(self, shown: Recommendation, answer: Recommendation) -> Reason | None:
        """Return a transient reason that only the second answer has."""
        return answer.reason if answer.reason in _OF_THE_MOMENT and answer.reason is not shown.reason else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRanker:
    """The LLM of the same bundle, for answers of other tiers.

    `recommend_by` builds a path whose LLM tier accepts any non-empty history.
    """

    share: float
    agreement: Histogram
    recommend_by: RecommendBy
    max_deadline_ms: int
    by: str = "teacher"

    def bundle_for(self, record: AnswerRecord, routing: RoutingRecord) -> Live | None:
        """Return the bundle of the answer, unless the LLM gave it or only the popular items were known."""
        is_comparable = record.answer.tier is not Tier.LLM and not routing.context.live.is_partial
        return routing.context.live if is_comparable else None

    def recommend(self, live: Live, routing: RoutingRecord) -> Recommend:
        """Return the path on a surface with the LLM as first tier."""
        return self.recommend_by(names=_One(live), surfaces=_Only(_LLM_FIRST), sinks=())

    def deadline_ms(self, routing: RoutingRecord) -> int:
        """Return the longest deadline, since no caller waits."""
        return self.max_deadline_ms

    def flaw(self, shown: Recommendation, answer: Recommendation) -> Reason | None:
        return None if answer.tier is Tier.LLM else answer.reason


class Shadow:
    """Samples answers, ranks them again in the background, and observes the overlap. One per process."""

    def __init__(
        self,
        rankers: Sequence[SecondRanker],
        load: LoadMonitor,
        samples: Counter,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` returns numbers in [0, 1)."""
        self._rankers = [ranker for ranker in rankers if ranker.share > 0]
        self._load = load
        self._samples = samples
        self._clock = clock
        self._draw = draw
        self._ranking: asyncio.Task[None] | None = None

    @property
    def sinks(self) -> tuple[AnswerSink, ...]:
        """The sink of answers; empty if sampling is off."""
        return (self.answered,) if self._rankers else ()

    def answered(self, record: AnswerRecord) -> None:
        """Sample the answer and start its second ranking in the background."""
        routing = record.routing
        if routing is None or routing.context.lookup.is_unavailable or record.request.subject is not None:
            return  # answered from memory, or a list that no model ranks
        for ranker in self._rankers:
            if self._draw() >= ranker.share or (live := ranker.bundle_for(record, routing)) is None:
                continue
            if self._ranking is not None and not self._ranking.done():
                self._samples.labels(ranker.by, "busy").inc()
                continue
            ranking = self._rank(ranker, live, record, routing)
            self._ranking = asyncio.get_running_loop().create_task(ranking, context=Context())

    async def stop(self) -> None:
        if self._ranking is not None:
            self._ranking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ranking

    async def _rank(self, ranker: SecondRanker, live: Live, record: AnswerRecord, routing: RoutingRecord) -> None:
        await asyncio.sleep(_PAUSE_S)
        try:
            outcome = await self._outcome(ranker, live, record, routing)
        except Exception as error:  # noqa: BLE001 - the request is already answered
            log.warning("shadow_failed", by=ranker.by, request_id=record.request.request_id, error=repr(error))
            outcome = "failed"
        self._samples.labels(ranker.by, outcome).inc()

    async def _outcome(self, ranker: SecondRanker, live: Live, record: AnswerRecord, routing: RoutingRecord) -> str:
        if not self._load.has_spare_capacity:
            return "no_capacity"
        shown, context = record.answer, routing.context
        deadline_ms = ranker.deadline_ms(routing)
        request = msgspec.structs.replace(context.request, next=None, rationale=False, deadline_ms=deadline_ms)
        caller = replace(record.caller, priority=Priority.LOW)
        features = _Known(_features_for(live, routing))
        recommend = ranker.recommend(live, routing)
        answer = await recommend(request, Arrival(self._clock()), _DOOR, caller, features)
        if (reason := ranker.flaw(shown, answer)) is not None:
            return reason.value
        overlap = rank_biased_overlap([item.item_id for item in shown.items], [item.item_id for item in answer.items])
        if overlap is None:
            return "empty"
        ranker.agreement.labels(live.name, shown.tier.value, live.version).observe(overlap)
        return "compared"


def _features_for(live: Live, routing: RoutingRecord) -> UserFeatures:
    """Return the features that the request read; keep the stored list only if it belongs to this bundle too."""
    known, read_for = routing.context.lookup.features, routing.context.live
    return known if live.lists_version == read_for.lists_version else replace(known, precomputed=None)


@dataclass(frozen=True, slots=True)
class _One:
    """Returns the same bundle for every request."""

    live: Live

    def find(self, name: str | None, unit_id: str | None, now_ms: float) -> Live:
        return self.live

    async def find_soon(self, name: str | None, unit_id: str | None, now_ms: float, timeout_s: float) -> Live:
        return self.live


@dataclass(frozen=True, slots=True)
class _Only:
    """Returns the same surface for every request."""

    surface: Surface

    def find(self, name: str | None, unit_id: str | None, tenant: str = DEFAULT_TENANT) -> Surface:
        return self.surface


@dataclass(frozen=True, slots=True)
class _Known:
    """Features that have already been read."""

    features: UserFeatures

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        return self.features

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        return dict.fromkeys(user_ids, self.features)
