"""The request metrics: the only place where the doors' recommendations and events are counted."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import Counter, Histogram

from services.contracts.recommend import Reason, Recommendation, Tier
from services.contracts.tenant import DEFAULT_TENANT, OPERATOR, scoped
from services.errors import ErrorKind
from services.gateway.records.answer import AnswerRecord, RefusalRecord, RoutingRecord
from services.gateway.request.context import NUM_COMPARED
from services.observability.metrics import GatewayMetrics

_NONE = "none"
_DOORS = ("rest", "grpc")
_NUM_ANSWERS_KEPT = 20_000
_MAX_TENANTS, _OTHERS = 200, "(others)"
_JUDGED_BY_TEACHER = (Tier.PRECOMPUTED, Tier.STUDENT)


class AnswerSource(NamedTuple):
    """The tier and bundle of an answer."""

    tier: str
    bundle_version: str


class _Series(NamedTuple):
    """The series of one kind of answer, and its source."""

    requests: Counter
    answers: Counter
    seconds: Histogram
    source: AnswerSource


class AnswerMetrics:
    """Counts answers, refusals and events."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._attribution = Attribution(_NUM_ANSWERS_KEPT)
        self._series: dict[tuple[str, ...], _Series] = {}
        self._tenants = {DEFAULT_TENANT}
        _begin_at_zero(metrics)
        self._num_answered = self._num_late = 0

    def bundle_loaded(self, name: str, version: str) -> None:
        """Create the series of a bundle, served under this name, that service objectives count."""
        for tier in _JUDGED_BY_TEACHER:
            self._metrics.teacher_agreement.labels(name, tier.value, version)

    def take_late_share(self) -> float:
        """Return the fraction (0 to 1) of late answers since the last call; 0 without answers."""
        share = self._num_late / self._num_answered if self._num_answered else 0.0
        self._num_answered = self._num_late = 0
        return share

    def answered(self, record: AnswerRecord) -> None:
        """Count an answer."""
        metrics, answer, is_late = self._metrics, record.answer, record.is_late
        self._num_answered += 1
        self._num_late += is_late
        series = self._series_of(record.door, answer)
        series.requests.inc()
        series.answers.inc()
        series.seconds.observe(record.elapsed_s)
        self._count_tenant(record.caller.tenant, "shed" if answer.reason is Reason.SHED else "full")
        self._attribution.answered(scoped(record.caller.tenant, answer.request_id), series.source)
        for stage, milliseconds in answer.stages_ms.items():
            metrics.stage_seconds.labels(stage).observe(milliseconds / 1_000)
        if answer.feature_age_ms is not None:
            metrics.feature_age_seconds.observe(answer.feature_age_ms / 1_000)
        if record.request.surface is not None:  # bounded: only names of surfaces and models get here
            metrics.surface_answers.labels(record.request.surface, answer.tier.value).inc()
        if is_late:
            metrics.deadline_missed.labels(record.door).inc()
        if record.routing is not None:
            self._observe_agreement(record.routing)
            self._observe_stored_list(record.routing, record.now_ms)

    def _series_of(self, door: str, answer: Recommendation) -> _Series:
        """Return the series of this kind of answer; cached, since three label lookups cost more than counting."""
        kind = (door, answer.tier, answer.reason, answer.bundle_version)
        if kind not in self._series:
            tier, metrics = answer.tier.value, self._metrics
            self._series[kind] = _Series(
                metrics.requests.labels(door, tier, answer.reason.value, "ok"),
                metrics.answers.labels(tier, answer.bundle_version),
                metrics.request_seconds.labels(door, tier),
                AnswerSource(tier, answer.bundle_version),
            )
        return self._series[kind]

    def _observe_agreement(self, routing: RoutingRecord) -> None:
        """Compare the top items of LLM and student, if both ranked."""
        llm, student = routing.results.get(Tier.LLM), routing.results.get(Tier.STUDENT)
        if llm is None or student is None or llm.ranking is None or student.ranking is None:
            return
        agreement = agreement_of(llm.ranking.indices.tolist(), student.ranking.indices.tolist(), NUM_COMPARED)
        if agreement is not None:
            self._metrics.agreement.observe(agreement)

    def _observe_stored_list(self, routing: RoutingRecord, now_ms: int) -> None:
        """Observe the age of the user's stored list, whether it was shown or not."""
        stored = routing.context.lookup.features.precomputed
        if stored is None:
            return
        if stored.made_at_s is not None:
            self._metrics.list_age_seconds.observe(max(0.0, now_ms / 1_000 - stored.made_at_s))

    def refused(self, record: RefusalRecord) -> None:
        self._metrics.requests.labels(record.door, _NONE, _NONE, record.code).inc()
        if record.tenant is not None:
            self._count_tenant(record.tenant, record.code)

    def _count_tenant(self, tenant: str, outcome: str) -> None:
        """Count a request of a tenant; those beyond the first tenants share a label, so that the series are bounded."""
        if len(self._tenants) < _MAX_TENANTS:
            self._tenants.add(tenant)
        label = (tenant or OPERATOR) if tenant in self._tenants else _OTHERS
        self._metrics.tenant_requests.labels(label, outcome).inc()

    def recorded(self, door: str, request_ids: Sequence[str | None], num_unknown: int) -> None:
        """Count acknowledged events, each with its scoped request id if any; `num_unknown` are of unknown items."""
        self._metrics.events.labels(door, "ok").inc(len(request_ids))
        self._metrics.unknown_item_events.labels(door).inc(num_unknown)
        found = [source for sent in request_ids if sent and (source := self._attribution.source_of(sent))]
        for source in set(found):
            self._metrics.attributed_events.labels(*source).inc(found.count(source))

    def events_refused(self, door: str, code: str) -> None:
        """Count a refused events request; its number of events may be unknown."""
        self._metrics.events.labels(door, code).inc()


class Attribution:
    """The sources of the newest `max_kept` answers by request id, to attribute clicks that name their request.

    Per process: a click that reaches another replica than its answer, or comes much later, is not attributed. Replicas
    are chosen independently of tiers, so the tiers' shares are comparable; their sum is too low by the number of
    replicas.
    """

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._sources: OrderedDict[str, AnswerSource] = OrderedDict()

    def answered(self, request_id: str, source: AnswerSource) -> None:
        """Keep an answer's source, shared by all answers of its kind.

        A repeated request id refers to its newest answer.
        """
        self._sources[request_id] = source
        self._sources.move_to_end(request_id)
        if len(self._sources) > self._max_kept:
            self._sources.popitem(last=False)

    def source_of(self, request_id: str) -> AnswerSource | None:
        return self._sources.get(request_id)


def agreement_of(llm: Sequence[int], student: Sequence[int], k: int) -> float | None:
    """Return the fraction (0 to 1) of the LLM's first k item indices that the student's first k contain.

    Returns None if empty.
    """
    first = set(llm[:k])
    return len(first.intersection(student[:k])) / len(first) if first else None


def _begin_at_zero(metrics: GatewayMetrics) -> None:
    """Create the series of alerts and objectives at 0: Prometheus sees no increase in a series that begins at 1."""
    for door in _DOORS:
        metrics.deadline_missed.labels(door)
        for kind in ErrorKind:
            metrics.requests.labels(door, _NONE, _NONE, kind.value)
        for tier in Tier:
            metrics.request_seconds.labels(door, tier.value)
