"""What a request leaves behind for its explanation: references only, since most explanations are never asked for.

Spelling them out costs some ten microseconds and happens after the answer has gone. Decides nothing.
"""

from dataclasses import dataclass, fields

from services.contracts.explanation import Explanation, ListState, LlmPart
from services.contracts.recommend import Recommendation
from services.gateway.llm_tier import LlmAnswer
from services.gateway.question import Question
from services.gateway.stages import Stages
from services.router.policy import Facts, LlmOutcome, Route

_FACTS = tuple(one.name for one in fields(Facts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answered request. `answered_s` is on the clock of its deadline, `now_ms` Unix time."""

    question: Question
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

    def explain(self) -> Explanation:
        """Spell it out."""
        question, answer, caller = self.question, self.answer, self.question.caller
        return Explanation(
            request_id=answer.request_id,
            door=self.door,
            outcome="ok",
            at_unix_ms=self.now_ms,
            trace_id=self.trace_id,
            user_id=question.request.user_id,
            caller=caller.key_id,
            priority=caller.priority.name.lower(),
            tier=answer.tier.value,
            reason=answer.reason.value,
            planned_tier=self.planned.tier.value,
            planned_reason=self.planned.reason.value,
            bundle_version=answer.bundle_version,
            k=question.request.k,
            num_items=len(answer.items),
            deadline_ms=answer.deadline_ms,
            elapsed_ms=round((self.answered_s - question.deadline.arrived_s) * 1_000, 3),
            feature_age_ms=answer.feature_age_ms,
            list_state=list_state(question).value,
            facts={name: getattr(self.facts, name) for name in _FACTS},
            llm=None if self.llm is None else _llm_part(self.llm),
            stages=self.stages.timeline(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that got an error."""

    request_id: str
    door: str
    code: str
    message: str
    now_ms: int

    def explain(self) -> Explanation:
        """Spell it out."""
        return Explanation(
            request_id=self.request_id, door=self.door, outcome=self.code, message=self.message, at_unix_ms=self.now_ms
        )


def list_state(question: Question) -> ListState:
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


def _llm_part(asked: LlmAnswer) -> LlmPart:
    result = asked.result
    if asked.outcome is not LlmOutcome.IN_TIME or result is None:
        return LlmPart(outcome=asked.outcome.value)
    return LlmPart(
        outcome=asked.outcome.value,
        num_prompt_tokens=result.num_prompt_tokens,
        num_cached_tokens=result.num_cached_tokens,
        num_steps=result.num_steps,
        queue_ms=round(result.queue_ms, 3),
        compute_ms=round(result.compute_ms, 3),
        decode_ms=round(result.decode_ms, 3),
    )
