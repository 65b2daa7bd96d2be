"""The LLM tier: sends a request to a replica of the name and maps every way it can end to an outcome for the policy.

Records each outcome at the name's gate. Does not know Ray: the port is below.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import structlog
from opentelemetry.trace import SpanKind
from prometheus_client import Gauge

from models.mixer import DECODER
from services.contracts.rank import RankRequest, RankResult
from services.contracts.recommend import Filters, Tier
from services.errors import (
    BundleError,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    ModelLoading,
    Overloaded,
)
from services.gateway.ranking import ItemRanking
from services.gateway.request.context import RequestContext
from services.gateway.tiers.tier import TierResult
from services.observability.tracing import trace_headers
from services.router.gate import LlmGate, LlmView
from services.router.policy import LlmOutcome, LlmRule, failure_of
from services.router.replica import RankSize, SentRequest

log = structlog.get_logger()

_MAX_IDS_SENT = 500


class Llm(Protocol):
    """The LLM replicas of one name."""

    def replicas(self) -> Sequence[str]:
        """Return the names of the running replicas; empty while unknown."""
        ...

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        """Rank within `timeout_s`.

        Raises Overloaded, DependencyUnavailable, DeadlineExceeded, BundleError or InvalidRequest.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmResult(TierResult):
    """The outcome of an LLM request. `reply` is present only if it arrived in time."""

    outcome: LlmOutcome
    reply: RankResult | None = None


class GatedLlm(NamedTuple):
    """The replicas of one name, behind their gate."""

    llm: Llm
    gate: LlmGate


class LlmTier:
    """The LLMs of all names. A failing or slow LLM closes only its own gate."""

    tier = Tier.LLM

    def __init__(
        self,
        by_name: Mapping[str, GatedLlm],
        rule: LlmRule,
        beam_width: int,
        breaker_open: Gauge,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._by_name = by_name
        self._rule = rule
        self._beam_width = beam_width
        self._breaker_open = breaker_open
        for name in by_name:
            breaker_open.labels(name).set(0)
        self._clock = clock
        self._trials: set[asyncio.Task[TierResult]] = set()

    def view(self, context: RequestContext, budget_s: float) -> LlmView:
        """Return the state of the LLM for this request now."""
        llm, gate = self._by_name[context.live.name]
        return gate.view(llm.replicas(), rank_size(context), context.caller.priority, budget_s, self._clock())

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, float]:
        """Return whether the LLM may be called for this history, its breaker state, and its predicted time."""
        view, rule = self.view(context, budget_s), self._rule
        return {
            "min_history_for_llm": rule.min_history,
            "llm_allowed": self.tier in context.surface.tiers,
            "llm_pays": not rule.needs_gain or context.live.llm_pays(len(context.history)),
            "breaker_allows": view.breaker_allows,
            "num_in_flight": view.num_in_flight,
            "max_in_flight": view.max_in_flight,
            "predicted_s": view.predicted_s,
        }

    def rank(self, context: RequestContext) -> "asyncio.Task[TierResult]":
        """Start a request to the LLM, and a copy to a silent replica that is due for a trial.

        Both count as in flight from this call on, so consecutive routing decisions see each other.
        """
        view = self.view(context, context.deadline.budget_s(self._clock()))
        if view.trial is not None:
            ranking = self._rank(context, (view.trial,))
            trial = self._started(context, view.trial, asyncio.create_task(ranking, context=Context()))
            self._trials.add(trial)
            trial.add_done_callback(self._trials.discard)
        return self._started(context, view.replicas[0], asyncio.create_task(self._measured(context, view.replicas)))

    def _started(
        self, context: RequestContext, replica: str, ranking: "asyncio.Task[TierResult]"
    ) -> "asyncio.Task[TierResult]":
        name, now_s = context.live.name, self._clock()
        sent = self._by_name[name].gate.started(replica, rank_size(context), now_s, context.deadline.budget_s(now_s))
        ranking.add_done_callback(lambda done: self._ended(done, sent, name))
        return ranking

    async def _measured(self, context: RequestContext, replicas: Sequence[str]) -> TierResult:
        with context.stages.measure("llm", SpanKind.CLIENT):
            return await self._rank(context, replicas)

    async def _rank(self, context: RequestContext, replicas: Sequence[str]) -> TierResult:
        budget_s = context.deadline.budget_s(self._clock())
        beam_width = context.live.search.beam_width or self._beam_width
        request, llm = rank_request(context, budget_s, beam_width, replicas), self._by_name[context.live.name].llm
        outcome, reply = await _outcome(llm, request, budget_s)
        if reply is None:
            return LlmResult(failure=failure_of(outcome), outcome=outcome)
        ranking = ItemRanking.of(Tier.LLM, reply.item_ids, reply.scores, context.live.catalogue)
        if (added := context.live.added(DECODER, context.history)) is not None:
            allowed = context.masks.allowed[: context.live.items.num_known]
            ranking = ItemRanking(
                Tier.LLM, *added.best_ranked(ranking.indices, ranking.scores, allowed, context.num_ranked)
            )
        return LlmResult(ranking=ranking, outcome=outcome, reply=reply)

    def _ended(self, ranking: "asyncio.Task[TierResult]", sent: SentRequest, name: str) -> None:
        """Record the outcome at the gate.

        A done callback, since a task cancelled before its first step never executes any of its code.
        """
        result = None if ranking.cancelled() or ranking.exception() is not None else ranking.result()
        outcome = result.outcome if isinstance(result, LlmResult) else LlmOutcome.ABANDONED
        now_s, reply = self._clock(), result.reply if isinstance(result, LlmResult) else None
        answered_by = None if reply is None else reply.replica or sent.replica
        gate = self._by_name[name].gate
        gate.ended(outcome, sent, now_s, answered_by)
        if reply is not None and answered_by is not None:
            gate.reported(answered_by, reply.load, now_s)
        self._breaker_open.labels(name).set(gate.is_open(now_s))


def rank_size(context: RequestContext) -> RankSize:
    """Return the size of a ranking. A user's requests share a session; each anonymous request has its own."""
    request, catalogue = context.request, context.live.catalogue
    prompt, search = context.live.prompt, context.live.search
    window_start, num_items = prompt.window(len(context.history))
    return RankSize(
        session=f"user {request.user_id}" if request.user_id is not None else f"request {request.request_id}",
        window_start=window_start,
        num_prompt_tokens=prompt.num_tokens(num_items, catalogue.depth),
        num_beam_rows=context.num_from_beams(search.beam_width or 1) * (catalogue.depth + len(search.close) - 1),
    )


def num_from_llm(context: RequestContext, beam_width: int) -> int:
    """Return the number of items that the LLM ranks; all beams if its ranking is mixed with other sources."""
    num, mixer = context.num_from_beams(beam_width), context.live.mixer
    if mixer is None or mixer.blend(DECODER, len(context.history)) is None:
        return num
    return max(num, min(beam_width, context.masks.num_allowed))


def rank_request(
    context: RequestContext, budget_s: float, beam_width: int, replicas: Sequence[str] = ()
) -> RankRequest:
    """Return the request for a replica, with a unique id: callers may reuse an id concurrently."""
    request = context.request
    seen = context.history_item_ids if request.exclude_seen else ()
    disliked = context.lookup.features.disliked_item_ids
    return RankRequest(
        request_id=f"{request.request_id}.{uuid.uuid4().hex}",
        user_id=request.user_id,
        name=context.live.name,
        bundle_version=context.live.version,
        history_item_ids=context.history_item_ids,
        k=num_from_llm(context, beam_width),
        budget_ms=budget_s * 1_000,
        excluded_item_ids=tuple(dict.fromkeys(seen + disliked + request.excluded_item_ids)),
        filters=_filters_of(context),
        priority=context.caller.priority,
        replicas=tuple(name for name in replicas if name),
        trace=trace_headers(),
    )


def _filters_of(context: RequestContext) -> Filters:
    """Return the filters for a replica.

    An expression that few items match is replaced by the ids of the bundle's matching items, which the replica need not
    compile.
    """
    filters, masks = context.request.filters, context.masks
    if filters.expression is None or not 0 < masks.num_allowed_if_seen <= _MAX_IDS_SENT:
        return filters
    item_ids = context.live.catalogue.item_ids
    known = np.flatnonzero(masks.allowed_if_seen[: len(item_ids)])
    return Filters(allowed_item_ids=tuple(item_ids[index] for index in known.tolist()))


async def _outcome(llm: Llm, request: RankRequest, timeout_s: float) -> tuple[LlmOutcome, RankResult | None]:
    try:
        reply = await llm.rank(request, timeout_s)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return LlmOutcome.FAILED, None  # cancelled at the other end, not by our caller
    except Exception as error:  # noqa: BLE001 - every LLM failure is an outcome
        return _outcome_of(error), None
    if reply.bundle_version != request.bundle_version:
        return LlmOutcome.MISMATCH, None
    is_ranking = bool(reply.item_ids) and all(map(math.isfinite, reply.scores))
    return (LlmOutcome.IN_TIME, reply) if is_ranking else (LlmOutcome.FAILED, None)


def _outcome_of(error: Exception) -> LlmOutcome:
    match error:
        case DeadlineExceeded():
            return LlmOutcome.LATE
        case Overloaded():
            return LlmOutcome.OVERLOADED
        case DependencyUnavailable():
            return LlmOutcome.UNAVAILABLE
        case ModelLoading():
            return LlmOutcome.LOADING
        case BundleError():
            return LlmOutcome.MISMATCH
        case InvalidRequest():
            log.warning("llm_refused", error=str(error))
            return LlmOutcome.REFUSED
        case _:
            log.warning("llm_failed", error=repr(error))
            return LlmOutcome.FAILED
