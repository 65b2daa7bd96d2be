"""What the span of a request says once it is answered: who made it, why, and every fact that the policy decided by.

Listed in docs/traces.md.
"""

from dataclasses import fields

from services.gateway.explaining import Answered
from services.router.policy import Facts
from services.tracing import Attributes, here

_FACTS = tuple((one.name, f"tailrace.fact.{one.name}") for one in fields(Facts))


def note_answer(answered: Answered) -> None:
    """Add the answer's attributes to the open span; where nothing is traced, do nothing."""
    if (place := here()) is not None:
        place.span.set_attributes(attributes_of(answered))


def attributes_of(answered: Answered) -> Attributes:
    """Give the attributes of an answered request."""
    answer, planned, llm = answered.answer, answered.planned, answered.llm
    return {
        "tailrace.request_id": answer.request_id,
        "tailrace.caller": answered.question.caller.key_id,
        "tailrace.tier": answer.tier.value,
        "tailrace.reason": answer.reason.value,
        "tailrace.planned_tier": planned.tier.value,
        "tailrace.planned_reason": planned.reason.value,
        "tailrace.bundle_version": answer.bundle_version,
        "tailrace.deadline_ms": answer.deadline_ms,
        "tailrace.num_items": len(answer.items),
        **({} if llm is None else {"tailrace.llm.outcome": llm.outcome.value}),
        **{attribute: getattr(answered.facts, name) for name, attribute in _FACTS},
    }
