"""The request path from top to bottom: features, masks, routing, ranking, answer, record.

A request is answered before its deadline: every failure becomes a fact for `services.router.policy`, the only module
that selects tiers. Knows neither JSON nor protobuf, no tier by name, and no clock except the two it is given.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from opentelemetry.trace import SpanKind

from models.wishes.mixing import wish_mix_of
from services.contracts.access import Caller
from services.contracts.recommend import (
    Rationale,
    RationaleOutcome,
    Reason,
    Recommendation,
    RecommendRequest,
    ScoredItem,
    Tier,
)
from services.contracts.tenant import DEFAULT_TENANT
from services.errors import DependencyUnavailable, as_tailrace_error
from services.gateway.overload.admission import AdmissionDecision
from services.gateway.overload.long_work import LongWork
from services.gateway.overload.monitor import LoadMonitor
from services.gateway.ranking import Chosen, ItemRanking, as_items, choose
from services.gateway.records.answer import AnswerRecord, AnswerSink, FailureRecord, FailureSink, RoutingRecord
from services.gateway.request.context import (
    UNREAD,
    FeatureLookup,
    Features,
    RequestContext,
    StageTimer,
    avoided,
    build_context,
    look_up_features,
)
from services.gateway.request.live_bundle import Live
from services.gateway.request.masks import check_items, clauses_of
from services.gateway.request.pages import Pages
from services.gateway.request.wish import ReadWish, limits_of
from services.gateway.rules.slate import Known
from services.gateway.rules.stage import Ruled, apply_rules
from services.gateway.surfaces.surface import Surface
from services.gateway.text.rationale import RationaleWriter
from services.gateway.tiers.popular import PopularTier
from services.gateway.tiers.tier import COMPLETED_BY, RankingTier, TierResult
from services.gateway.wishes.mixing import mixed
from services.items.expression import Budget, Compiled
from services.observability.tracing import trace_id
from services.router import policy
from services.router.deadline import Arrival, Deadline, DeadlineLimits, deadline_from
from services.router.policy import RoutingDecision

_FEATURES_SHARE = 0.5
_WISH_SHARE = 0.5
_LOADING_SHARE = 0.45
"""Below the part of its deadline after which the queue counts a request as late."""
_NUM_SPARE = 50
"""Items that are ranked beyond an answer, for items hidden meanwhile."""


class _Admitted(NamedTuple):
    """A request that will be answered, with the values that every answer to it reports."""

    request: RecommendRequest
    caller: Caller
    door: str
    deadline: Deadline
    live: Live
    variant: str | None


class BundleFinder(Protocol):
    """Finds the bundle of a request."""

    def find(self, name: str | None, unit_id: str | None, now_ms: float) -> Live:
        """Return the bundle assigned to this user, or visitor session, under a name at this time (Unix ms).

        Raises InvalidRequest or DependencyUnavailable.
        """
        ...

    async def find_soon(self, name: str | None, unit_id: str | None, now_ms: float, timeout_s: float) -> Live:
        """Return the bundle as `find` does, or its popular items if it is not loaded within this time."""
        ...


class WishSource(Protocol):
    """Reads the wish of a request."""

    async def read(self, request: RecommendRequest, live: Live, timeout_s: float) -> ReadWish:
        """Read the wishes of a request, and search its words in titles, within `timeout_s`. Never raises."""
        ...


class SurfaceFinder(Protocol):
    """Finds the surface of a request."""

    def find(self, name: str | None, unit_id: str | None, tenant: str = DEFAULT_TENANT) -> Surface:
        """Return this tenant's surface of this name as assigned to this user (or session). Raises InvalidRequest."""
        ...


class Recommend:
    """Answers recommendation requests. One per process; holds no request state."""

    def __init__(
        self,
        *,
        names: BundleFinder,
        surfaces: SurfaceFinder,
        features: Features,
        tiers: Sequence[RankingTier],
        last: PopularTier,
        load: LoadMonitor,
        rationale: RationaleWriter,
        pages: Pages,
        wishes: WishSource,
        compiling: LongWork,
        sinks: Sequence[AnswerSink],
        failure_sinks: Sequence[FailureSink] = (),
        limits: DeadlineLimits,
        feature_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`tiers` are in order of quality; `last` fills the positions they leave empty.

        `draw` returns a uniform number in [0, 1), for exploration.
        """
        self._names = names
        self._surfaces = surfaces
        self._features = features
        self._tiers: Mapping[Tier, RankingTier] = {tier.tier: tier for tier in (*tiers, last)}
        self._last = last
        self._load = load
        self._rationale = rationale
        self._pages = pages
        self._wishes = wishes
        self._compiling = compiling
        self._sinks = sinks
        self._failure_sinks = failure_sinks
        self._limits = limits
        self._feature_timeout_s = feature_timeout_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._draw = draw

    async def __call__(
        self,
        request: RecommendRequest,
        arrival: Arrival,
        door: str,
        caller: Caller,
        features: Features | None = None,
        budget: Budget | None = None,
    ) -> Recommendation:
        """Answer a request of `caller` that arrived through `door`.

        `features` replaces the store, if given; `budget` is the filter budget of the batch that contains the request.

        Raises:
            InvalidRequest: More items than the caller may request, an unknown surface, or filters or rules that name
                unknown values or exceed the budget.
            NotFound: An unknown subject item.
            DependencyUnavailable: Before the first bundle of the name is loaded.
            Overloaded: This priority is refused even an answer from memory, or the deadline has passed.
            DeadlineExceeded: The masks of the filters were not computed in time.
        """
        assert request.tenant == caller.tenant, "a door's requests go through the tenant's plane"
        surface = self._surfaces.find(request.surface, request.unit_id, request.tenant)
        live = await self._live_soon(request, surface, arrival)
        try:
            with self._load.handling():
                return await self._assigned(request, arrival, door, caller, features, budget, surface, live)
        except BaseException as error:  # the assignment is recorded however the request ends
            self._record_failure(request, live, surface.variant, error)
            raise

    async def _assigned(
        self,
        request: RecommendRequest,
        arrival: Arrival,
        door: str,
        caller: Caller,
        features: Features | None,
        budget: Budget | None,
        surface: Surface,
        live: Live,
    ) -> Recommendation:
        """Answer a request with the bundle assigned to its user."""
        if not live.is_partial:  # the whole catalogue may have what the request names
            check_items(request, live.items, live.expressions, budget)
        request = surface.applied_to(request.excluding_seen(default=not live.repeats))
        request.check_k(caller.max_k)
        deadline_ms = surface.deadline_ms if request.deadline_ms is None else request.deadline_ms
        deadline = deadline_from(arrival.at_s, deadline_ms, self._limits, self._load.tail_delay_s)
        self._refuse_expired(arrival, deadline)
        budget_s = deadline.budget_s(self._clock())
        request = request.after(await self._pages.shown_before(request, live, budget_s))
        is_in_time = await self._load.queue.begin(caller.priority, deadline, caller.tenant, caller.weight)
        self._refuse_expired(arrival, deadline)
        verdict = self._load.judge(caller.priority, caller.tenant, caller.weight, is_in_time=is_in_time)
        if verdict is AdmissionDecision.REFUSE:
            raise self._load.refusal("strain")
        admitted = _Admitted(request, caller, door, deadline, live, surface.variant)
        if verdict is AdmissionDecision.SHED and (items := self._last.items_from_memory(request, live)) is not None:
            return self._answer_from_memory(admitted, items)

        stages = StageTimer(self._clock, arrival.at_s)
        expressions = await self._compile(request, live, deadline, stages)
        is_shed = verdict is AdmissionDecision.SHED
        wish = None if is_shed or not request.wishes else self._begin_reading(request, live, deadline, stages)
        with self._load.working(caller.tenant), stages.measure("features"):
            lookup = UNREAD if is_shed else await self._read(request, live.lists_version, deadline, features)
        read_wish = None if wish is None else await wish
        with stages.measure("route"):
            request = request.after(avoided(request, lookup.features, self._wall_clock()))
            context = build_context(request, surface, caller, deadline, live, lookup, stages, expressions)
            if read_wish is not None:
                context = await self._wished(context, read_wish)
            budget_s = deadline.budget_s(self._clock())
            facts = context.facts((tier.facts(context, budget_s) for tier in self._tiers.values()), budget_s)
            planned = policy.plan(facts)
        with self._load.working(caller.tenant), stages.measure("rank"):
            decided, results = await self._rank(context, planned)
        with stages.measure("answer"):
            chosen, ruled = self._choose(context, results, decided.tier)
            items = as_items(chosen, live.items)
            if read_wish is not None and read_wish.reading is None:
                decided = RoutingDecision(decided.tier, Reason.WISH_NOT_READ)
        rationale = await self._write_rationale(context, items) if request.rationale else None

        routing = RoutingRecord(context=context, facts=facts, results=results, ruled=ruled)
        return self._answered(admitted, planned, decided, items, stages.as_ms(), rationale, routing)

    def _refuse_expired(self, arrival: Arrival, deadline: Deadline) -> None:
        """Refuse a request whose deadline passes within this turn of the loop; the queue counts no slow upload."""
        if arrival.waited_s > 0 and deadline.remaining_s(self._clock()) <= self._load.queue.turn_s:
            raise self._load.refusal("expired")

    def _record_failure(self, request: RecommendRequest, live: Live, variant: str | None, error: BaseException) -> None:
        code = as_tailrace_error(error).kind.value if isinstance(error, Exception) else "gone"
        now_ms = int(self._wall_clock() * 1_000)
        record = FailureRecord(
            request=request, name=live.name, version=live.version, variant=variant, code=code, now_ms=now_ms
        )
        for sink in self._failure_sinks:
            sink(record)

    def lists_version_for(self, request: RecommendRequest) -> str:
        """Return the version of the stored lists that this request reads now. Raises as a call does."""
        return self._live_for(
            request, self._surfaces.find(request.surface, request.unit_id, request.tenant)
        ).lists_version

    async def _live_soon(self, request: RecommendRequest, surface: Surface, arrival: Arrival) -> Live:
        """Return the bundle of a request, waiting for its load within this stage's fraction of the deadline."""
        with suppress(DependencyUnavailable):
            return self._live_for(request, surface)
        deadline = deadline_from(arrival.at_s, request.deadline_ms, self._limits, self._load.tail_delay_s)
        wait_s = max(0.0, _LOADING_SHARE * deadline.budget_s(self._clock()))
        return await self._names.find_soon(surface.model, request.unit_id, self._wall_clock() * 1_000, wait_s)

    def _live_for(self, request: RecommendRequest, surface: Surface) -> Live:
        """Return the bundle assigned to this user or visitor now."""
        return self._names.find(surface.model, request.unit_id, self._wall_clock() * 1_000)

    def _answer_from_memory(self, admitted: _Admitted, items: tuple[ScoredItem, ...]) -> Recommendation:
        shed = RoutingDecision(self._last.tier, Reason.SHED)
        stages_ms = {"answer": round((self._clock() - admitted.deadline.arrived_s) * 1_000, 3)}
        rationale = Rationale(RationaleOutcome.BUSY) if admitted.request.rationale else None
        return self._answered(admitted, shed, shed, items, stages_ms, rationale, routing=None)

    def _answered(
        self,
        admitted: _Admitted,
        planned: RoutingDecision,
        decided: RoutingDecision,
        items: tuple[ScoredItem, ...],
        stages_ms: dict[str, float],
        rationale: Rationale | None,
        routing: RoutingRecord | None,
    ) -> Recommendation:
        """Return the answer after passing its record to every sink. `routing` is None for an answer from memory."""
        now_ms = int(self._wall_clock() * 1_000)
        newest_ms = None if routing is None else routing.context.lookup.features.newest_event_time_ms
        answer = Recommendation(
            request_id=admitted.request.request_id,
            items=items,
            tier=decided.tier,
            reason=decided.reason,
            bundle_version=admitted.live.version,
            newest_event_time_ms=newest_ms,
            feature_age_ms=None if newest_ms is None else max(0, now_ms - newest_ms),
            deadline_ms=admitted.deadline.total_ms,
            stages_ms=stages_ms,
            rationale=None if rationale is None else rationale.sentence,
            rationale_reason=None if rationale is None else rationale.outcome,
            next=self._pages.next_token(admitted.request, items),
            understood=None if routing is None or routing.context.wish is None else routing.context.wish.understood,
        )
        record = AnswerRecord(
            request=admitted.request,
            caller=admitted.caller,
            door=admitted.door,
            deadline=admitted.deadline,
            planned=planned,
            answer=answer,
            name=admitted.live.name,
            answered_s=self._clock(),
            now_ms=now_ms,
            trace_id=trace_id(),
            variant=admitted.variant,
            routing=routing,
        )
        for sink in self._sinks:
            sink(record)
        return answer

    async def _compile(self, request: RecommendRequest, live: Live, deadline: Deadline, stages: StageTimer) -> Compiled:
        """Return the masks of the request's clauses, computed off the event loop if that takes long.

        Raises DeadlineExceeded.
        """
        clauses = [clause for _, clause in clauses_of(request)]
        compiled = live.expressions.compiled_soon(clauses)
        if compiled is None:
            with stages.measure("filters"):
                budget_s = deadline.budget_s(self._clock())
                compiled = await self._compiling.run(budget_s, live.expressions.compiled, clauses)
        return compiled

    async def _read(
        self, request: RecommendRequest, version: str, deadline: Deadline, features: Features | None
    ) -> FeatureLookup:
        """Read the user's features within this stage's fraction of the deadline."""
        timeout_s = min(self._feature_timeout_s, _FEATURES_SHARE * deadline.budget_s(self._clock()))
        return await look_up_features(features or self._features, request.user_id, version, timeout_s)

    def _begin_reading(
        self, request: RecommendRequest, live: Live, deadline: Deadline, stages: StageTimer
    ) -> "asyncio.Task[ReadWish]":
        """Start reading the wish, within this stage's fraction of the deadline."""

        async def read() -> ReadWish:
            with stages.measure("wish"):
                return await self._wishes.read(request, live, _WISH_SHARE * deadline.budget_s(self._clock()))

        return asyncio.create_task(read())

    async def _wished(self, context: RequestContext, wish: ReadWish) -> RequestContext:
        """Return the context under the wish's exclusions, relaxed where they leave no item. Raises DeadlineExceeded."""
        if wish.reading is None and wish.titles is None:
            return context
        for limited in limits_of(context.request, wish):
            compiled = await self._compile(limited.request, context.live, context.deadline, context.stages)
            context = build_context(
                limited.request,
                context.surface,
                context.caller,
                context.deadline,
                context.live,
                context.lookup,
                context.stages,
                compiled,
                limited.wish,
            )
            if limited.leaves_items(context.masks):
                break
        return context

    async def _rank(
        self, context: RequestContext, planned: RoutingDecision
    ) -> tuple[RoutingDecision, dict[Tier, TierResult]]:
        """Rank with the planned tier, then with its fallbacks in turn until a tier returns a ranking.

        For a wish, the tier that completes a short ranking ranks too.
        """
        decided, results = planned, await self._run(planned.tier, context)
        completing = None if context.wish is None else COMPLETED_BY.get(planned.tier)
        if completing is not None and completing not in results:
            results |= await self._run(completing, context)
        while (failure := results[decided.tier].failure) is not None:
            decided = policy.fall_back(decided, failure)
            if decided.tier not in results:
                results |= await self._run(decided.tier, context)
        return decided, results

    async def _run(self, tier: Tier, context: RequestContext) -> dict[Tier, TierResult]:
        """Run one tier.

        The fallback of a remote tier ranks concurrently, so a late answer costs no extra time; it is awaited only if
        needed.
        """
        started = self._tiers[tier].rank(context)
        if not isinstance(started, asyncio.Task):
            return {tier: started}
        fallback: asyncio.Task[dict[Tier, TierResult]] | None = None
        try:
            await asyncio.sleep(0)  # send the request before the fallback, below, occupies this thread
            fallback = asyncio.create_task(self._run(policy.FALLBACKS[tier], context))
            result = await started
            is_enough = result.ranking is not None and len(result.ranking.indices) >= context.num_wanted
            others = {} if is_enough and not fallback.done() else await fallback
            return others | {tier: result}
        finally:
            started.cancel()
            if fallback is not None:
                fallback.cancel()

    def _choose(
        self, context: RequestContext, results: Mapping[Tier, TierResult], answering: Tier
    ) -> tuple[list[Chosen], Ruled | None]:
        """Choose the items from the rankings, applying the request's rules and the surface's exploration."""
        rankings: Iterable[ItemRanking] = self._in_order(context, results)
        showable, rules = context.masks.showable, context.request.rules
        available, exploration = context.live.items.columns.available, context.surface.explore
        if context.wish is not None:
            num = max(context.num_wanted, context.num_candidates) + _NUM_SPARE
            rankings = [mixed(rankings, context.wish, wish_mix_of(context.live.manifest), answering, showable, num)]
        if not rules.reorder and exploration is None:
            return choose(rankings, showable, context.request.num_items, available), None
        known = Known(
            expressions=context.expressions,
            index=context.live.items.lookup,
            showable=showable,
            available=available,
            vectors=context.live.vectors,
            shown=context.lookup.features.shown,
            now_ms=int(self._wall_clock() * 1_000),
        )
        ruled = apply_rules(
            rankings,
            rules,
            known,
            context.num_wanted,
            context.num_candidates,
            answering,
            exploration,
            self._draw(),
        )
        return ruled.chosen, ruled

    def _in_order(self, context: RequestContext, results: Mapping[Tier, TierResult]) -> Iterator[ItemRanking]:
        """Yield the rankings in the order that fills the answer; the last tier ranks only if needed."""
        last = self._last.tier
        for tier in self._tiers:
            if tier is not last and tier in results and (ranking := results[tier].ranking) is not None:
                yield ranking
        filling = results[last] if last in results else self._last.rank(context)
        if filling.ranking is not None:
            yield filling.ranking

    async def _write_rationale(self, context: RequestContext, items: tuple[ScoredItem, ...]) -> Rationale:
        """Write the rationale within the rest of the deadline. It omits hidden items of the history."""
        known, available = context.live.items, context.live.items.columns.available
        with context.stages.measure("rationale", SpanKind.CLIENT):
            seen = [known.title(index) for index in context.history if available[index]]
            shown = [item.title for item in items]
            return await self._rationale(seen, shown, context.deadline.budget_s(self._clock()))
