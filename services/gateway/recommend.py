"""The request, from top to bottom: features, masks, route, student beside the LLM, answer, impression.

It always answers before the deadline, and every failure is a fact for `services.router.policy`, which alone decides who
answers. Knows neither JSON nor protobuf, and no clock but the two it is given.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog
from opentelemetry.trace import SpanKind

from services.contracts.access import Caller
from services.contracts.events import Impression
from services.contracts.rank import RankResult
from services.contracts.recommend import (
    Rationale,
    RationaleOutcome,
    Reason,
    Recommendation,
    RecommendRequest,
    ScoredItem,
    Tier,
)
from services.errors import Overloaded
from services.gateway.events.impressions import Impressions
from services.gateway.records.explaining import Answered, Shed
from services.gateway.records.explanations import Explanations
from services.gateway.records.report import Report
from services.gateway.records.spans import note_answer, note_shed
from services.gateway.request.candidates import Ranking, as_items, best_allowed, choose
from services.gateway.request.context import (
    UNREAD,
    FeatureLookup,
    Features,
    RequestContext,
    build_context,
    look_up_features,
)
from services.gateway.request.load_monitor import LoadWatch
from services.gateway.request.stages import Stages
from services.gateway.text.rationale import RationaleWriter
from services.gateway.tiers.from_memory import FromMemory
from services.gateway.tiers.live_bundle import LiveBundle
from services.gateway.tiers.llm import LlmAnswer, LlmTier
from services.gateway.tiers.popular import Popular
from services.observability.tracing import trace_id
from services.router import policy
from services.router.admission import Verdict
from services.router.deadline import Deadline, DeadlineLimits, deadline_from
from services.router.policy import Route

log = structlog.get_logger()

_FEATURES_SHARE = 0.5
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class _Ranked:
    """How ranking ended: the final route, the rankings, best first, and what became of asking the LLM, if it was asked."""

    route: Route
    rankings: list[Ranking]
    llm: LlmAnswer | None = None


class Recommend:
    """Answers recommendation requests. One per process; holds no state of a request."""

    def __init__(
        self,
        *,
        live: LiveBundle,
        features: Features,
        llm: LlmTier,
        popular: Popular,
        impressions: Impressions,
        report: Report,
        explanations: Explanations,
        load: LoadWatch,
        rationale: RationaleWriter,
        limits: DeadlineLimits,
        feature_timeout_s: float,
        min_history_for_llm: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._live = live
        self._features = features
        self._llm = llm
        self._popular = popular
        self._memory = FromMemory(popular)
        self._impressions = impressions
        self._report = report
        self._explanations = explanations
        self._load = load
        self._rationale = rationale
        self._limits = limits
        self._feature_timeout_s = feature_timeout_s
        self._min_history_for_llm = min_history_for_llm
        self._clock = clock
        self._wall_clock = wall_clock

    async def __call__(self, request: RecommendRequest, arrived_s: float, door: str, caller: Caller) -> Recommendation:
        """Answer one request of `caller` that arrived at `arrived_s` (monotonic seconds) through `door`.

        Raises InvalidRequest for more items than the caller may ask for and for filters that name what the catalogue
        lacks, DependencyAway before the first bundle, Overloaded when this priority gets no answer even from memory.
        """
        request.check_k(caller.max_k)
        live = self._live.current()
        live.catalogue.check_filters(request.filters)
        deadline = deadline_from(arrived_s, request.deadline_ms, self._limits)
        verdict = self._load.judge(caller.priority)
        if verdict is Verdict.REFUSE:
            raise Overloaded("the gateway", _RETRY_AFTER_S)
        if verdict is Verdict.SHED and (items := self._memory.items(request, live)) is not None:
            return self._from_memory(request, caller, deadline, live.version, items, door)

        stages = Stages(self._clock, arrived_s)
        with self._load.working(), stages.measure("features"):
            known = UNREAD if verdict is Verdict.SHED else await self._read(request, deadline)
        with stages.measure("route"):
            question = build_context(request, caller, deadline, live, known)
            budget_s = deadline.budget_s(self._clock())
            facts = question.facts(self._llm.view(caller.priority), self._min_history_for_llm, budget_s)
            planned = policy.plan(facts)
        with self._load.working(), stages.measure("rank"):
            ranked = await self._rank(question, planned, stages)
        with stages.measure("answer"):
            rankings = self._from_the_top(question, ranked.rankings)
            items = as_items(choose(rankings, question.masks.showable, request.k), live.catalogue)
        rationale = await self._write_rationale(question, items, stages) if request.rationale else None

        now_ms = int(self._wall_clock() * 1_000)
        if known.features.precomputed is not None:
            self._report.list_found(known.features.precomputed, live.version, now_ms / 1_000)
        newest_ms = known.features.newest_event_time_ms
        answer = Recommendation(
            request_id=request.request_id,
            items=items,
            tier=ranked.route.tier,
            reason=ranked.route.reason,
            bundle_version=live.version,
            newest_event_time_ms=newest_ms,
            feature_age_ms=None if newest_ms is None else max(0, now_ms - newest_ms),
            deadline_ms=deadline.total_ms,
            stages_ms=stages.as_ms(),
            rationale=rationale,
        )
        asyncio.get_running_loop().call_soon(self._impressions.offer, impression_of(question, answer, now_ms))
        answered_s = self._clock()
        self._report.answered(door, answer, deadline, answered_s)
        told = Answered(
            question=question,
            facts=facts,
            planned=planned,
            llm=ranked.llm,
            answer=answer,
            stages=stages,
            door=door,
            answered_s=answered_s,
            now_ms=now_ms,
            trace_id=trace_id(),
        )
        note_answer(told)
        self._explanations.offer(told)
        return answer

    def _from_memory(
        self,
        request: RecommendRequest,
        caller: Caller,
        deadline: Deadline,
        version: str,
        items: tuple[ScoredItem, ...],
        door: str,
    ) -> Recommendation:
        """Answer with these popular items. Leaves counts and an explanation, and neither a log line nor an impression.

        Those two cost as much as the answer, when there is least to spend, and say the same of everybody.
        """
        answered_s = self._clock()
        elapsed_s = answered_s - deadline.arrived_s
        answer = Recommendation(
            request_id=request.request_id,
            items=items,
            tier=Tier.POPULAR,
            reason=Reason.SHED,
            bundle_version=version,
            newest_event_time_ms=None,
            feature_age_ms=None,
            deadline_ms=deadline.total_ms,
            stages_ms={"answer": round(elapsed_s * 1_000, 3)},
            rationale=Rationale(RationaleOutcome.BUSY) if request.rationale else None,
        )
        self._report.counted(door, answer, deadline, answered_s)
        told = Shed(
            request=request,
            caller=caller,
            answer=answer,
            door=door,
            elapsed_s=elapsed_s,
            now_ms=int(self._wall_clock() * 1_000),
            trace_id=trace_id(),
        )
        note_shed(told)
        self._explanations.offer(told)
        return answer

    async def _read(self, request: RecommendRequest, deadline: Deadline) -> FeatureLookup:
        """Read what is known of the user, within this stage's share of the deadline."""
        box_s = min(self._feature_timeout_s, _FEATURES_SHARE * deadline.budget_s(self._clock()))
        return await look_up_features(self._features, request.user_id, box_s)

    async def _rank(self, question: RequestContext, planned: Route, stages: Stages) -> "_Ranked":
        """Have the planned tier rank, with the student beside the LLM."""
        if planned.tier is Tier.PRECOMPUTED and question.listed is not None:
            return _Ranked(planned, [question.listed])
        if planned.tier is Tier.POPULAR:
            return _Ranked(planned, [])
        if planned.tier is Tier.STUDENT:
            student = self._ask_student(question, stages)
            return _Ranked(policy.after_student(planned, student_ranked=bool(student)), student)

        with stages.measure("llm", SpanKind.CLIENT):
            budget_s = question.deadline.budget_s(self._clock())
            asking = self._llm.ask(question.for_llm(self._wall_clock() + budget_s), budget_s)
            try:
                await asyncio.sleep(0)  # the question leaves before the student, below, holds this thread
                student = self._ask_student(question, stages)
                llm = await asking
            finally:
                asking.cancel()
        route = policy.after_student(policy.after_llm(llm.outcome), student_ranked=bool(student))
        llm_ranked = _llm_ranking(question, llm.result)
        if llm_ranked and student:
            self._report.both_ranked(llm_ranked[0].indices, student[0].indices, question.num_wanted)
        return _Ranked(route, llm_ranked + student, llm)

    def _ask_student(self, question: RequestContext, stages: Stages) -> list[Ranking]:
        """Return the student's ranking, or none: a fact for the policy, whatever its runtime broke at."""
        with stages.measure("student"):
            try:
                indices, scores = question.live.student.rank(
                    question.history, question.masks.allowed, question.num_wanted
                )
            except Exception as error:  # noqa: BLE001 - see above
                log.warning("student_failed", request_id=question.request.request_id, error=repr(error))
                return []
        return [Ranking(Tier.STUDENT, indices.tolist(), scores.tolist())]

    async def _write_rationale(
        self, question: RequestContext, items: tuple[ScoredItem, ...], stages: Stages
    ) -> Rationale:
        """Have the rationale written in what is left of the deadline, which is the longest that the items wait for it."""
        titles = question.live.catalogue.titles
        with stages.measure("rationale", SpanKind.CLIENT):
            box_s = question.deadline.budget_s(self._clock())
            seen, shown = [titles[index] for index in question.history], [item.title for item in items]
            return await self._rationale(seen, shown, box_s)

    def _from_the_top(self, question: RequestContext, best: list[Ranking]) -> Iterator[Ranking]:
        """Return the rankings in the order in which they fill the answer; popularity is ranked only when it comes to that."""
        yield from best
        popular = self._popular.ranking(question.live.version, question.live.catalogue)
        num_enough = 2 * question.num_wanted
        yield Ranking(Tier.POPULAR, *best_allowed(popular.order, popular.scores, question.masks.showable, num_enough))


def impression_of(question: RequestContext, answer: Recommendation, now_ms: int) -> Impression:
    """Describe what is about to be shown, and the history that it was made from."""
    history = question.known.features
    return Impression(
        request_id=answer.request_id,
        user_id=question.request.user_id,
        shown_time_ms=now_ms,
        item_ids=tuple(item.item_id for item in answer.items),
        tier=answer.tier.value,
        reason=answer.reason.value,
        bundle_version=answer.bundle_version,
        newest_event_time_ms=answer.newest_event_time_ms,
        history_len=len(history.history_item_ids),
        history_digest=history.history_digest,
        features_as_of_us=history.as_of_us,
    )


def _llm_ranking(question: RequestContext, result: RankResult | None) -> list[Ranking]:
    if result is None:
        return []
    return [Ranking.of(Tier.LLM, result.item_ids, result.scores, question.live.catalogue)]
