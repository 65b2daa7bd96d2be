"""The small sinks: the log line, the span attributes (listed in docs/traces.md), and the impression for Kafka."""

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Protocol

import structlog
from prometheus_client import Counter

from services.contracts.events import Impression
from services.contracts.recommend import Tier
from services.gateway.records.answer import AnswerRecord, FailureRecord, RefusalRecord, RoutingRecord
from services.gateway.tiers.llm import LlmResult
from services.observability.tracing import Attributes, here
from services.router.policy import Facts

log = structlog.get_logger()

_FACT_ATTRIBUTES = tuple((field.name, f"tailrace.fact.{field.name}") for field in fields(Facts))


def log_answer(record: AnswerRecord) -> None:
    """Write the log line of an answer. Skipped for answers from memory, which cost no more than the line."""
    if record.routing is None:
        return
    answer = record.answer
    log.info(
        "recommended",
        request_id=answer.request_id,
        door=record.door,
        tier=answer.tier.value,
        reason=answer.reason.value,
        surface=record.request.surface,
        variant=record.variant,
        name=record.name,
        num_items=len(answer.items),
        bundle_version=answer.bundle_version,
        deadline_ms=answer.deadline_ms,
        elapsed_ms=round(record.elapsed_s * 1_000, 3),
        is_late=record.is_late,
        feature_age_ms=answer.feature_age_ms,
        stages_ms=answer.stages_ms,
        timestamp=_iso(record.now_ms),
    )


def _iso(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def log_refusal(record: RefusalRecord) -> None:
    log.info(
        "recommend_refused", request_id=record.request_id, door=record.door, code=record.code, message=record.message
    )


def set_span_attributes(record: AnswerRecord) -> None:
    """Add the answer's attributes to the open span, if any."""
    if (current := here()) is not None:
        current.span.set_attributes(_attributes(record))


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
    if record.request.surface is not None:
        attributes["tailrace.surface"] = record.request.surface
    if record.variant is not None:
        attributes["tailrace.variant"] = record.variant
    if routing is not None:
        if isinstance(llm := routing.results.get(Tier.LLM), LlmResult):
            attributes["tailrace.llm.outcome"] = llm.outcome.value
        attributes |= {attribute: getattr(routing.facts, name) for name, attribute in _FACT_ATTRIBUTES}
    return attributes


class RecordSink(Protocol):
    """Takes records without ever blocking."""

    def offer(self, record: tuple[bytes, bytes], on_done: Callable[[bool], None]) -> bool:
        """Take a record (key, value), or return False if the buffer is full.

        `on_done` receives whether it was delivered.
        """
        ...


class Impressions:
    """Sends an impression for each answer, and counts the outcomes: sent, failed or dropped."""

    def __init__(
        self, sink: RecordSink, outcomes: Counter, is_releasing: Callable[[str], bool] = lambda _name: False
    ) -> None:
        """`is_releasing` returns whether a release of this name is in progress."""
        self._sink = sink
        self._is_releasing = is_releasing
        self._sent = outcomes.labels("sent")
        self._failed = outcomes.labels("failed")
        self._dropped = outcomes.labels("dropped")

    def answered(self, record: AnswerRecord) -> None:
        """Send the impression of an answer.

        An answer from memory has no impression: it would cost as much as the answer, and all callers get the same
        items. During a release it is recorded as a request without a list of its version.
        """
        if record.routing is not None:
            self._send(impression_of(record, record.routing))
        else:
            self.failed(
                FailureRecord(
                    request=record.request,
                    name=record.name,
                    version=record.answer.bundle_version,
                    variant=record.variant,
                    code=record.answer.reason.value,
                    now_ms=record.now_ms,
                )
            )

    def failed(self, record: FailureRecord) -> None:
        """Send a record of a known user's request without a list; only during a release, for canary analysis."""
        if record.request.user_id is not None and self._is_releasing(record.name):
            self._send(failure_of(record))

    def _send(self, impression: Impression) -> None:
        if not self._sink.offer((impression.key, impression.encode()), self._settled):
            self._dropped.inc()

    def _settled(self, arrived: bool) -> None:
        (self._sent if arrived else self._failed).inc()


def failure_of(record: FailureRecord) -> Impression:
    """Return the impression of an assigned request without a list."""
    return Impression(
        request_id=record.request.request_id,
        user_id=record.request.user_id,
        shown_time_ms=record.now_ms,
        item_ids=(),
        tier="",
        reason="",
        bundle_version=record.version,
        history_len=0,
        history_digest="",
        name=record.name,
        surface=record.request.surface,
        variant=record.variant,
        failure=record.code,
    )


def impression_of(record: AnswerRecord, routing: RoutingRecord) -> Impression:
    """Return the impression of an answer, with the history it was made from."""
    answer, features = record.answer, routing.context.lookup.features
    return Impression(
        request_id=answer.request_id,
        user_id=record.request.user_id,
        shown_time_ms=record.now_ms,
        item_ids=tuple(item.item_id for item in answer.items),
        tier=answer.tier.value,
        reason=answer.reason.value,
        bundle_version=answer.bundle_version,
        newest_event_time_ms=answer.newest_event_time_ms,
        history_len=len(features.history_item_ids),
        history_digest=features.history_digest,
        features_as_of_us=features.as_of_us,
        name=record.name,
        surface=record.request.surface,
        variant=record.variant,
        scores=tuple(item.score for item in answer.items),
        propensity=None if routing.ruled is None else routing.ruled.propensity,
        elapsed_ms=round(record.elapsed_s * 1_000, 3),
        deadline_ms=answer.deadline_ms,
        session=_hashed(record.request.session_id) if record.request.user_id is None else None,
    )


def _hashed(session_id: str | None) -> str | None:
    return None if session_id is None else blake2b(session_id.encode(), digest_size=8).hexdigest()
