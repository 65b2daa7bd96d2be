"""What a request leaves behind for its explanation: references only, since most explanations are never asked for.

They are spelled out after the answer has gone. Decides nothing.
"""

from dataclasses import dataclass, fields
from operator import attrgetter

from services.contracts.access import Caller
from services.contracts.explanation import OWN_FIELDS, ListState, encode_explanation
from services.contracts.recommend import Recommendation, RecommendRequest
from services.gateway.request.context import RequestContext
from services.gateway.request.stages import Stages
from services.gateway.tiers.llm import LlmAnswer
from services.router.policy import Facts, LlmOutcome, Route

FACT_NAMES = tuple(one.name for one in fields(Facts))
_facts_of = attrgetter(*FACT_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answered request. `answered_s` is on the clock of its deadline, `now_ms` Unix time."""

    question: RequestContext
    facts: Facts
    planned: Route
    llm: LlmAnswer | None
    answer: Recommendation
    stages: Stages
    door: str
    answered_s: float
    now_ms: int
    trace_id: str | None

    @property
    def request_id(self) -> str:
        """Under which id it is found."""
        return self.answer.request_id

    @property
    def is_slow(self) -> bool:
        """Whether somebody may ask why: over half of its deadline used, or answered by another tier than planned."""
        return self.elapsed_s * 2_000 > self.answer.deadline_ms or self.answer.tier is not self.planned.tier

    @property
    def elapsed_s(self) -> float:
        """Seconds from its arrival until it was answered."""
        return self.answered_s - self.question.deadline.arrived_s

    def record(self) -> bytes:
        """Spell it out, in the stored form."""
        question = self.question
        own = _own_fields(self, question.request, question.caller, self.planned, list_state(question))
        llm = None if self.llm is None else _llm_part(self.llm)
        return encode_explanation(own, _facts_of(self.facts), llm, self.stages.raw())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """A request that was answered from memory. Planned so, and nothing was gathered to decide by."""

    request: RecommendRequest
    caller: Caller
    answer: Recommendation
    door: str
    elapsed_s: float
    now_ms: int
    trace_id: str | None

    @property
    def request_id(self) -> str:
        """Under which id it is found."""
        return self.answer.request_id

    @property
    def is_slow(self) -> bool:
        """Whether somebody may ask why: over half of its deadline used."""
        return self.elapsed_s * 2_000 > self.answer.deadline_ms

    def record(self) -> bytes:
        """Spell it out, in the stored form."""
        planned = Route(self.answer.tier, self.answer.reason)
        own = _own_fields(self, self.request, self.caller, planned, ListState.NOT_READ)
        return encode_explanation(own, (), None, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that got an error."""

    request_id: str
    door: str
    code: str
    message: str
    now_ms: int

    @property
    def is_slow(self) -> bool:
        """A refusal was quick, and its caller was told why."""
        return False

    def record(self) -> bytes:
        """Spell it out, in the stored form."""
        own = (self.request_id, self.door, self.code, self.now_ms, self.message)
        return encode_explanation((*own, *[None] * (len(OWN_FIELDS) - len(own))), (), None, ())


def _own_fields(
    case: Answered | Shed, request: RecommendRequest, caller: Caller, planned: Route, stored: ListState
) -> tuple[object, ...]:
    """Return an answered request's values, in the order of OWN_FIELDS."""
    answer = case.answer
    return (
        answer.request_id,
        case.door,
        "ok",
        case.now_ms,
        None,
        case.trace_id,
        request.user_id,
        caller.key_id,
        caller.priority.name.lower(),
        answer.tier,
        answer.reason,
        planned.tier,
        planned.reason,
        answer.bundle_version,
        request.k,
        len(answer.items),
        answer.deadline_ms,
        round(case.elapsed_s * 1_000, 3),
        answer.feature_age_ms,
        stored,
    )


def list_state(question: RequestContext) -> ListState:
    """Say what became of the user's stored list."""
    known, stored = question.known, question.known.features.precomputed
    if known.is_away or known.is_shed:
        return ListState.NOT_READ
    if stored is None:
        return ListState.NONE
    if question.listed is not None:
        return ListState.USABLE
    if stored.bundle_version != question.live.version:
        return ListState.OTHER_BUNDLE
    has_newer = len(question.history_item_ids) > len(known.features.history_item_ids) or (
        known.features.newest_event_time_ms is not None and known.features.newest_event_time_ms > stored.watermark_ms
    )
    return ListState.OLDER_THAN_EVENTS if has_newer else ListState.DOES_NOT_COVER


def _llm_part(asked: LlmAnswer) -> tuple[object, ...]:
    result = asked.result
    if asked.outcome is not LlmOutcome.IN_TIME or result is None:
        return (asked.outcome, None, None, None, None, None, None)
    counts = (result.num_prompt_tokens, result.num_cached_tokens, result.num_steps)
    return (asked.outcome, *counts, result.queue_ms, result.compute_ms, result.decode_ms)
