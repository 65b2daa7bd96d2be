"""What is told of every request: one log line and its metrics. The only place where the doors' traffic is counted.

Knows nothing of how an answer was made; reads it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import structlog
from prometheus_client import Counter, Histogram

from services.contracts.features import PrecomputedList
from services.contracts.recommend import Recommendation, Tier
from services.errors import ErrorKind
from services.gateway.events.attribution import Attribution
from services.observability.metrics import GatewayMetrics
from services.router.deadline import Deadline

log = structlog.get_logger()

_NOBODY = "none"
_DOORS = ("rest", "grpc", "openai")
_LIVE, _OTHER = "live", "other"
_NUM_ANSWERS_KEPT = 20_000


class _Series(NamedTuple):
    """Where one kind of answer is counted."""

    requests: Counter
    answers: Counter
    seconds: Histogram


class Report:
    """Counts and logs answers and refusals."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._attribution = Attribution(_NUM_ANSWERS_KEPT)
        self._series: dict[tuple[str, ...], _Series] = {}
        _begin_at_zero(metrics)
        self._num_answered = self._num_late = 0

    def take_late_share(self) -> float:
        """Return the share (0 to 1) of answers since the last call that were late; 0 when there was none."""
        share = self._num_late / self._num_answered if self._num_answered else 0.0
        self._num_answered = self._num_late = 0
        return share

    def answered(self, door: str, answer: Recommendation, deadline: Deadline, now_s: float) -> None:
        """A recommendation is ready to go out: count it and say so."""
        is_late = self.counted(door, answer, deadline, now_s)
        log.info(
            "recommended",
            request_id=answer.request_id,
            door=door,
            tier=answer.tier.value,
            reason=answer.reason.value,
            num_items=len(answer.items),
            bundle_version=answer.bundle_version,
            deadline_ms=answer.deadline_ms,
            elapsed_ms=round((now_s - deadline.arrived_s) * 1_000, 3),
            is_late=is_late,
            feature_age_ms=answer.feature_age_ms,
            stages_ms=answer.stages_ms,
        )

    def counted(self, door: str, answer: Recommendation, deadline: Deadline, now_s: float) -> bool:
        """Count a recommendation that is ready to go out, without a word in the log. Gives whether it is late."""
        metrics, is_late = self._metrics, deadline.remaining_s(now_s) < 0
        self._num_answered += 1
        self._num_late += is_late
        series = self._series_of(door, answer)
        series.requests.inc()
        series.answers.inc()
        series.seconds.observe(now_s - deadline.arrived_s)
        self._attribution.answered(answer)
        for stage, milliseconds in answer.stages_ms.items():
            metrics.stage_seconds.labels(stage).observe(milliseconds / 1_000)
        if answer.feature_age_ms is not None:
            metrics.feature_age_seconds.observe(answer.feature_age_ms / 1_000)
        if is_late:
            metrics.deadline_missed.labels(door).inc()
        return is_late

    def _series_of(self, door: str, answer: Recommendation) -> "_Series":
        """Return the series of such an answer; looking three up by their labels costs more than counting."""
        kind = (door, answer.tier, answer.reason, answer.bundle_version)
        if kind not in self._series:
            tier, metrics = answer.tier.value, self._metrics
            self._series[kind] = _Series(
                metrics.requests.labels(door, tier, answer.reason.value, "ok"),
                metrics.answers.labels(tier, answer.bundle_version),
                metrics.request_seconds.labels(door, tier),
            )
        return self._series[kind]

    def both_ranked(self, llm: Sequence[int], student: Sequence[int], k: int) -> None:
        """Both have ranked for one request (item indices, best first); compare their first k."""
        first = set(llm[:k])
        if first:
            self._metrics.agreement.observe(len(first.intersection(student[:k])) / len(first))

    def list_found(self, stored: PrecomputedList, live_version: str, now_s: float) -> None:
        """The store held a list for the user; `now_s` is Unix time."""
        self._metrics.lists.labels(_LIVE if stored.bundle_version == live_version else _OTHER).inc()
        if stored.made_at_s is not None:
            self._metrics.list_age_seconds.observe(max(0.0, now_s - stored.made_at_s))

    def attribute(self, request_ids: Sequence[str]) -> None:
        """Events named these requests as those that led to them."""
        for request_id in request_ids:
            if maker := self._attribution.maker_of(request_id):
                self._metrics.attributed_events.labels(*maker).inc()

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


def _begin_at_zero(metrics: GatewayMetrics) -> None:
    """Touch the series that alerts and objectives are made of: a first error that begins at 1 is no increase to Prometheus."""
    for bundle in (_LIVE, _OTHER):
        metrics.lists.labels(bundle)
    for door in _DOORS:
        metrics.deadline_missed.labels(door)
        for kind in ErrorKind:
            metrics.requests.labels(door, _NOBODY, _NOBODY, kind.value)
        for tier in Tier:
            metrics.request_seconds.labels(door, tier.value)
