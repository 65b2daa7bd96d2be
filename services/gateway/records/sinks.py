"""The sinks without state: one log line for each request, and the attributes of its span (listed in docs/traces.md)."""

from dataclasses import fields

import structlog

from services.contracts.recommend import Tier
from services.gateway.records.answer import AnswerRecord, RefusalRecord
from services.gateway.tiers.llm import LlmResult
from services.observability.tracing import Attributes, here
from services.router.policy import Facts

log = structlog.get_logger()

_FACT_ATTRIBUTES = tuple((one.name, f"tailrace.fact.{one.name}") for one in fields(Facts))


def log_answer(record: AnswerRecord) -> None:
    """Write the log line of an answer. A line costs as much as an answer from memory, which therefore gets none."""
    if record.routing is None:
        return
    answer = record.answer
    log.info(
        "recommended",
        request_id=answer.request_id,
        door=record.door,
        tier=answer.tier.value,
        reason=answer.reason.value,
        num_items=len(answer.items),
        bundle_version=answer.bundle_version,
        deadline_ms=answer.deadline_ms,
        elapsed_ms=round(record.elapsed_s * 1_000, 3),
        is_late=record.is_late,
        feature_age_ms=answer.feature_age_ms,
        stages_ms=answer.stages_ms,
    )


def log_refusal(record: RefusalRecord) -> None:
    """Write the log line of a refusal."""
    log.info(
        "recommend_refused", request_id=record.request_id, door=record.door, code=record.code, message=record.message
    )


def set_span_attributes(record: AnswerRecord) -> None:
    """Add the answer's attributes to the open span; without one, do nothing."""
    if (place := here()) is not None:
        place.span.set_attributes(_attributes(record))


def _attributes(record: AnswerRecord) -> Attributes:
    answer, routing = record.answer, record.routing
    attributes: dict[str, str | int | float | bool] = {
        "tailrace.request_id": answer.request_id,
        "tailrace.caller": record.caller.key_id,
        "tailrace.tier": answer.tier.value,
        "tailrace.reason": answer.reason.value,
        "tailrace.planned_tier": record.planned.tier.value,
        "tailrace.planned_reason": record.planned.reason.value,
        "tailrace.bundle_version": answer.bundle_version,
        "tailrace.deadline_ms": answer.deadline_ms,
        "tailrace.num_items": len(answer.items),
    }
    if routing is not None:
        if isinstance(llm := routing.results.get(Tier.LLM), LlmResult):
            attributes["tailrace.llm.outcome"] = llm.outcome.value
        attributes |= {attribute: getattr(routing.facts, name) for name, attribute in _FACT_ATTRIBUTES}
    return attributes
