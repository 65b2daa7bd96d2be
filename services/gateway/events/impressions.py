"""What was shown, on its way to Kafka: offered after the answer, never waited for, and counted when it is lost.

Does not know Kafka: it is handed something to offer records to.
"""

from collections.abc import Callable
from typing import Protocol

from prometheus_client import Counter

from services.contracts.events import Impression


class RecordSink(Protocol):
    """Something that takes records without ever blocking."""

    def offer(self, record: tuple[bytes, bytes], on_done: Callable[[bool], None]) -> bool:
        """Take a record (key, value), or say False when there is no room; `on_done` hears whether it arrived."""
        ...


class Impressions:
    """Offers impressions and counts what became of them: sent, failed or dropped."""

    def __init__(self, sink: RecordSink, outcomes: Counter) -> None:
        self._sink = sink
        self._sent = outcomes.labels("sent")
        self._failed = outcomes.labels("failed")
        self._dropped = outcomes.labels("dropped")

    def offer(self, impression: Impression) -> None:
        """Send one on its way, or drop it when too many are in flight."""
        if not self._sink.offer((impression.key, impression.encode()), self._settled):
            self._dropped.inc()

    def _settled(self, arrived: bool) -> None:
        (self._sent if arrived else self._failed).inc()
