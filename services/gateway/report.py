"""What is told of every request: one log line and its metrics. The only place where the doors' traffic is counted.

Knows nothing of how an answer was made; reads it.
"""

import structlog

from services.contracts.recommend import Recommendation
from services.router.deadline import Deadline
from services.telemetry import GatewayMetrics

log = structlog.get_logger()

_NOBODY = "none"


class Report:
    """Counts and logs answers and refusals."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._num_answered = self._num_late = 0

    def take_late_share(self) -> float:
        """Give the share (0 to 1) of answers since the last call that were late; 0 when there was none."""
        share = self._num_late / self._num_answered if self._num_answered else 0.0
        self._num_answered = self._num_late = 0
        return share

    def answered(self, door: str, answer: Recommendation, deadline: Deadline, now_s: float) -> None:
        """A recommendation is ready to go out."""
        elapsed_s, metrics = now_s - deadline.arrived_s, self._metrics
        is_late = deadline.remaining_s(now_s) < 0
        self._num_answered += 1
        self._num_late += is_late
        metrics.requests.labels(door, answer.tier.value, answer.reason.value, "ok").inc()
        metrics.request_seconds.labels(door, answer.tier.value).observe(elapsed_s)
        for stage, milliseconds in answer.stages_ms.items():
            metrics.stage_seconds.labels(stage).observe(milliseconds / 1_000)
        if answer.feature_age_ms is not None:
            metrics.feature_age_seconds.observe(answer.feature_age_ms / 1_000)
        if is_late:
            metrics.deadline_missed.labels(door).inc()
        log.info(
            "recommended",
            request_id=answer.request_id,
            door=door,
            tier=answer.tier.value,
            reason=answer.reason.value,
            num_items=len(answer.items),
            bundle_version=answer.bundle_version,
            deadline_ms=answer.deadline_ms,
            elapsed_ms=round(elapsed_s * 1_000, 3),
            is_late=is_late,
            feature_age_ms=answer.feature_age_ms,
            stages_ms=answer.stages_ms,
        )

    def recorded(self, door: str, num_events: int, request_id: str) -> None:
        """The broker has these events."""
        self._metrics.events.labels(door, "ok").inc(num_events)
        log.info("recorded", request_id=request_id, door=door, num_events=num_events)

    def recommend_refused(self, door: str, code: str, message: str, request_id: str) -> None:
        """A request for a recommendation got an error."""
        self._metrics.requests.labels(door, _NOBODY, _NOBODY, code).inc()
        log.info("recommend_refused", request_id=request_id, door=door, code=code, message=message)

    def events_refused(self, door: str, code: str, message: str, request_id: str) -> None:
        """A request to record events got an error; how many events it held may be unknown."""
        self._metrics.events.labels(door, code).inc()
        log.info("events_refused", request_id=request_id, door=door, code=code, message=message)
