"""The record of a request: created once and read by every sink (metrics, log, span, explanation, impression).

Holds references only. Expensive formatting is left to the sink that needs it, after the answer is sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.contracts.access import Caller
from services.contracts.recommend import Recommendation, RecommendRequest, Tier
from services.contracts.tenant import DEFAULT_TENANT
from services.gateway.request.context import RequestContext
from services.gateway.rules.stage import Ruled
from services.gateway.tiers.tier import TierResult
from services.router.deadline import Deadline
from services.router.policy import Facts, RoutingDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """How a request was routed and ranked: the facts, the result of each tier, and the rules stage if it ran."""

    context: RequestContext
    facts: Facts
    results: Mapping[Tier, TierResult]
    ruled: Ruled | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRecord:
    """An answered request.

    `name` is the name of the answering bundle, `answered_s` is on the clock of the deadline, `now_ms` is Unix time.
    `variant` names the experiment variants, as impressions do. `routing` is None for a shed request, which is
    answered from memory without reads or ranking.
    """

    request: RecommendRequest
    caller: Caller
    door: str
    deadline: Deadline
    planned: RoutingDecision
    answer: Recommendation
    name: str
    answered_s: float
    now_ms: int
    trace_id: str | None
    variant: str | None = None
    routing: RoutingRecord | None = None

    @property
    def elapsed_s(self) -> float:
        return self.answered_s - self.deadline.arrived_s

    @property
    def is_late(self) -> bool:
        return self.deadline.remaining_s(self.answered_s) < 0

    @property
    def is_slow(self) -> bool:
        """Whether an explanation is likely to be read: over half of the deadline used, or another tier than planned."""
        return self.elapsed_s * 2_000 > self.answer.deadline_ms or self.answer.tier is not self.planned.tier


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """A request without a list, after a bundle was assigned to its user.

    `code` is the error kind, or `gone` if the caller left.
    """

    request: RecommendRequest
    name: str
    version: str
    variant: str | None
    code: str
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalRecord:
    """A request that ended with an error. `code` is the error kind, `now_ms` Unix time, `tenant` None if unknown."""

    request_id: str
    door: str
    code: str
    message: str
    now_ms: int
    tenant: str | None = DEFAULT_TENANT


AnswerSink = Callable[[AnswerRecord], None]
"""Consumes the record of each answer. Runs on the request path: must not block."""
FailureSink = Callable[[FailureRecord], None]
"""Consumes the record of each assigned request without a list. Must not block."""
RefusalSink = Callable[[RefusalRecord], None]
"""Consumes the record of each refusal."""
