"""What was shown, on its way to Kafka: sent after the answer, without waiting, and counted if it is lost.

Does not know Kafka: the port is below.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from prometheus_client import Counter

from services.contracts.events import Impression
from services.gateway.records.answer import AnswerRecord, RoutingRecord


class RecordSink(Protocol):
    """Takes records without ever blocking."""

    def offer(self, record: tuple[bytes, bytes], on_done: Callable[[bool], None]) -> bool:
        """Take a record (key, value), or return False if there is no room; `on_done` gets whether it arrived."""
        ...


class Impressions:
    """Sends an impression for each answer, and counts the outcomes: sent, failed or dropped."""

    def __init__(self, sink: RecordSink, outcomes: Counter) -> None:
        self._sink = sink
        self._sent = outcomes.labels("sent")
        self._failed = outcomes.labels("failed")
        self._dropped = outcomes.labels("dropped")

    def answered(self, record: AnswerRecord) -> None:
        """Send the impression once the answer has gone.

        An answer from memory has none: it would cost as much as the answer, and all callers get the same items.
        """
        if record.routing is not None:
            asyncio.get_running_loop().call_soon(self._offer, record, record.routing)

    def _offer(self, record: AnswerRecord, routing: RoutingRecord) -> None:
        impression = impression_of(record, routing)
        if not self._sink.offer((impression.key, impression.encode()), self._settled):
            self._dropped.inc()

    def _settled(self, arrived: bool) -> None:
        (self._sent if arrived else self._failed).inc()


def impression_of(record: AnswerRecord, routing: RoutingRecord) -> Impression:
    """Describe what was shown, and the history from which it was made."""
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
    )
