"""Ranks a sample of the requests a second time after their answers, and compares: by the candidate of a release, or by the LLM where another tier answered.

A second ranking is an ordinary request through `Recommend`, with the features that the first one read, and with low priority: the same masks, rules and policy hold,
and it gives way wherever requests of low priority do. One at a time in a process, and only while there is spare capacity; what is drawn otherwise is skipped and
counted. Nothing of it is shown, sent or recorded but how alike the two lists are. Does not know how a candidate is loaded.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
from prometheus_client import Counter, Histogram

from services.contracts.access import Priority
from services.contracts.features import UserFeatures
from services.contracts.recommend import Reason, Recommendation, Tier
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
"""After an answer was made: it is formatted and sent meanwhile."""
_LLM_FIRST = Surface(tiers=frozenset({Tier.LLM, Tier.STUDENT, Tier.POPULAR}))
"""Without stored lists; the student only takes over where the LLM fails, so that the answer has the reason."""
_OF_THE_MOMENT = frozenset(
    {
        Reason.LLM_OVERLOADED,
        Reason.LLM_TOO_SLOW,
        Reason.LLM_LATE,
        Reason.LLM_UNAVAILABLE,
        Reason.LLM_FAILED,
        Reason.BUNDLE_MISMATCH,
        Reason.STUDENT_FAILED,
        Reason.SHED,
    }
)
"""Reasons for which a list says nothing of the models behind it."""


class RecommendBy(Protocol):
    """Makes the ordinary request's way with a bundle, surfaces and sinks of its own."""

    def __call__(self, *, names: BundleFinder, surfaces: SurfaceFinder, sinks: Sequence[AnswerSink]) -> Recommend:
        """Make it."""
        ...


class SecondRanker(Protocol):
    """Who ranks a request again."""

    @property
    def by(self) -> str:
        """Its name in metrics."""
        ...

    @property
    def share(self) -> float:
        """The share (0 to 1) of the answers that are drawn."""
        ...

    @property
    def agreement(self) -> Histogram:
        """Where the overlap goes, by model name, the answer's tier and the second ranking's bundle."""
        ...

    def bundle_for(self, record: AnswerRecord, routing: RoutingRecord) -> Live | None:
        """Return the bundle to rank with; None where there is nothing to compare."""
        ...

    def recommend(self, live: Live, routing: RoutingRecord) -> Recommend:
        """Return the request's way."""
        ...

    def deadline_ms(self, routing: RoutingRecord) -> int:
        """Return how long the second ranking may take."""
        ...

    def flaw(self, shown: Recommendation, answer: Recommendation) -> Reason | None:
        """Return the reason for which the two lists cannot be compared; None if they can."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The candidate of a release, as it would answer the same request. `beside` returns the one that is loaded beside a live bundle, if there is one."""

    share: float
    agreement: Histogram
    beside: Callable[[Live], Live | None]
    recommend_by: RecommendBy
    by: str = "candidate"

    def bundle_for(self, record: AnswerRecord, routing: RoutingRecord) -> Live | None:
        """Return the candidate."""
        return self.beside(routing.context.live)

    def recommend(self, live: Live, routing: RoutingRecord) -> Recommend:
        """Return the way of any request, on a surface with the same tiers; the rest of the surface is in the request already."""
        return self.recommend_by(
            names=_One(live), surfaces=_Only(Surface(tiers=routing.context.surface.tiers)), sinks=()
        )

    def deadline_ms(self, routing: RoutingRecord) -> int:
        """Return the request's own deadline, which decides the tier too."""
        return routing.context.deadline.total_ms

    def flaw(self, shown: Recommendation, answer: Recommendation) -> Reason | None:
        """Return a reason of the moment that only one of the two has."""
        return answer.reason if answer.reason in _OF_THE_MOMENT and answer.reason is not shown.reason else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The LLM of the same bundle, where another tier answered. `recommend_by` has an LLM tier that is asked wherever there is a history."""

    share: float
    agreement: Histogram
    recommend_by: RecommendBy
    max_deadline_ms: int
    by: str = "teacher"

    def bundle_for(self, record: AnswerRecord, routing: RoutingRecord) -> Live | None:
        """Return the bundle that answered."""
        return None if record.answer.tier is Tier.LLM else routing.context.live

    def recommend(self, live: Live, routing: RoutingRecord) -> Recommend:
        """Return the way on a surface where the LLM comes first."""
        return self.recommend_by(names=_One(live), surfaces=_Only(_LLM_FIRST), sinks=())

    def deadline_ms(self, routing: RoutingRecord) -> int:
        """Return the longest deadline, since nobody waits."""
        return self.max_deadline_ms

    def flaw(self, shown: Recommendation, answer: Recommendation) -> Reason | None:
        """Return why it was not the LLM that ranked."""
        return None if answer.tier is Tier.LLM else answer.reason


class Shadow:
    """Draws answers, has them ranked again in the background, and observes the overlap. One per process."""

    def __init__(
        self,
        rankers: Sequence[SecondRanker],
        load: LoadMonitor,
        samples: Counter,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Take the parts. `draw` returns numbers in [0, 1)."""
        self._rankers = [ranker for ranker in rankers if ranker.share > 0]
        self._load = load
        self._samples = samples
        self._clock = clock
        self._draw = draw
        self._ranking: asyncio.Task[None] | None = None

    @property
    def sinks(self) -> tuple[AnswerSink, ...]:
        """The sink of answers; none where nothing is ever drawn."""
        return (self.answered,) if self._rankers else ()

    def answered(self, record: AnswerRecord) -> None:
        """Draw, and begin what is drawn in the background."""
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
        """Cancel the ranking that is under way."""
        if self._ranking is not None:
            self._ranking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ranking

    async def _rank(self, ranker: SecondRanker, live: Live, record: AnswerRecord, routing: RoutingRecord) -> None:
        await asyncio.sleep(_PAUSE_S)
        try:
            outcome = await self._outcome(ranker, live, record, routing)
        except Exception as error:  # noqa: BLE001 - whatever it fails at, the request has its answer
            log.warning("shadow_failed", by=ranker.by, request_id=record.request.request_id, error=repr(error))
            outcome = "failed"
        self._samples.labels(ranker.by, outcome).inc()

    async def _outcome(self, ranker: SecondRanker, live: Live, record: AnswerRecord, routing: RoutingRecord) -> str:
        """Rank once more and observe the overlap; return what became of it."""
        if not self._load.has_spare_capacity:
            return "no_capacity"
        shown, context = record.answer, routing.context
        deadline_ms = ranker.deadline_ms(routing)
        request = replace(context.request, next=None, rationale=False, deadline_ms=deadline_ms)
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
    """Return the features that the request read; a stored list only where it is this bundle's too."""
    known, read_for = routing.context.lookup.features, routing.context.live
    return known if live.lists_version == read_for.lists_version else replace(known, precomputed=None)


@dataclass(frozen=True, slots=True)
class _One:
    """A bundle that does not change."""

    live: Live

    def find(self, name: str | None, unit_id: str | None, now_ms: float) -> Live:
        """Return it."""
        return self.live


@dataclass(frozen=True, slots=True)
class _Only:
    """The surface of every request."""

    surface: Surface

    def find(self, name: str | None, unit_id: str | None) -> Surface:
        """Return it."""
        return self.surface


@dataclass(frozen=True, slots=True)
class _Known:
    """Features that were read before."""

    features: UserFeatures

    async def read(self, user_id: str, bundle_version: str, timeout_s: float) -> UserFeatures:
        """Return them."""
        return self.features

    async def read_many(
        self, user_ids: Sequence[str], bundle_version: str, timeout_s: float
    ) -> Mapping[str, UserFeatures]:
        """Return them for each."""
        return dict.fromkeys(user_ids, self.features)
