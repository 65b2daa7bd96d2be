"""What the span of a request says once it is answered: who made it, why, and every fact that the policy decided by.

Listed in docs/traces.md.
"""

from dataclasses import fields

from services.contracts.recommend import Reason, Recommendation, Tier
from services.gateway.records.explaining import Answered, Shed
from services.observability.tracing import Attributes, here
from services.router.policy import Facts

_FACTS = tuple((one.name, f"tailrace.fact.{one.name}") for one in fields(Facts))


def note_answer(answered: Answered) -> None:
    """Add the answer's attributes to the open span; where nothing is traced, do nothing."""
    if (place := here()) is not None:
        place.span.set_attributes(attributes_of(answered))


def note_shed(shed: Shed) -> None:
    """Add to the open span what there is to say of an answer from memory; where nothing is traced, do nothing."""
    if (place := here()) is not None:
        place.span.set_attributes(_common(shed.answer, shed.caller.key_id, shed.answer.tier, shed.answer.reason))


def attributes_of(answered: Answered) -> Attributes:
    """Return the attributes of an answered request."""
    planned, llm = answered.planned, answered.llm
    return {
        **_common(answered.answer, answered.question.caller.key_id, planned.tier, planned.reason),
        **({} if llm is None else {"tailrace.llm.outcome": llm.outcome.value}),
        **{attribute: getattr(answered.facts, name) for name, attribute in _FACTS},
    }


def _common(answer: Recommendation, key_id: str, planned_tier: Tier, planned_reason: Reason) -> Attributes:
    return {
        "tailrace.request_id": answer.request_id,
        "tailrace.caller": key_id,
        "tailrace.tier": answer.tier.value,
        "tailrace.reason": answer.reason.value,
        "tailrace.planned_tier": planned_tier.value,
        "tailrace.planned_reason": planned_reason.value,
        "tailrace.bundle_version": answer.bundle_version,
        "tailrace.deadline_ms": answer.deadline_ms,
        "tailrace.num_items": len(answer.items),
    }
