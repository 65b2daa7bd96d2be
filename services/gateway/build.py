"""Composes the data plane from ports and configuration. Tests compose it with fakes.

To add a tier: add a file in `tiers/`, an entry in the tiers of `build_data_plane`, a rule in `services.router.policy`,
and a name in `services.contracts.recommend.Tier`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from models.catalogue import Catalogue
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from services.contracts.rank import RankRequest
from services.contracts.recommend import PopularIn, RecommendRequest
from services.contracts.tenant import tenant_of_name
from services.contracts.text import TextWriter
from services.errors import TailraceError
from services.gateway.assign import Assign
from services.gateway.batch import RecommendBatch
from services.gateway.data_plane import Bundles, Clocks, DataPlane, Operations, Records, Tiers
from services.gateway.events.items import ItemLog, ItemOperations, ItemReader
from services.gateway.events.record import EventLog, RecordEvents
from services.gateway.lifecycle import Thread
from services.gateway.overload.admission import Admission, AdmissionLimits
from services.gateway.overload.long_work import LongWork
from services.gateway.overload.monitor import LoadMonitor
from services.gateway.preview import PreviewSurface
from services.gateway.recommend import Recommend
from services.gateway.records.batches import BATCH_EVERY_S, AnswerBatches
from services.gateway.records.explanations import Explanations, ExplanationStore
from services.gateway.records.metrics import AnswerMetrics
from services.gateway.records.sinks import Impressions, RecordSink, log_answer, log_refusal, set_span_attributes
from services.gateway.request.context import Features
from services.gateway.request.live_bundle import Live, LiveBundle, Student, WishReader
from services.gateway.request.masks import check_rules, clauses_of
from services.gateway.request.names import NameResidency, Names
from services.gateway.request.pages import PageKey, Pages
from services.gateway.shadow import CandidateRanker, Shadow, TeacherRanker
from services.gateway.surfaces.experiments import RunningExperiments
from services.gateway.surfaces.surface import Surface
from services.gateway.surfaces.surfaces import Surfaces
from services.gateway.text.metrics import TextReport
from services.gateway.text.rationale import RationaleWriter
from services.gateway.text.tier import NUM_PLACES, TextLimits, TextTier
from services.gateway.tiers.llm import GatedLlm, Llm, LlmTier
from services.gateway.tiers.popular import PopularityWindows, PopularTier
from services.gateway.tiers.precomputed import PrecomputedTier
from services.gateway.tiers.similar import SimilarTier
from services.gateway.tiers.student import StudentTier
from services.gateway.users.erase import BrokerKeeps, EraseUsers, Receipts
from services.gateway.users.export import ExportUser
from services.gateway.wishes.readers import WishReaders
from services.gateway.wishes.search import TitleSearch
from services.gateway.wishes.wishes import Wishes
from services.items.live_items import LiveItems
from services.observability.metrics import GatewayMetrics, ResidencyMetrics, TextMetrics
from services.router.breaker import Breaker
from services.router.deadline import DeadlineLimits
from services.router.gate import LlmGate
from services.router.placement import Placement
from services.router.policy import LlmRule
from services.router.predictor import LatencyPredictor
from services.router.replica import Replica

_WARM_UP_S = 10.0
_ANY_HISTORY = LlmRule(min_history=1, needs_gain=False)


class FeatureStore(Features, PopularityWindows, Protocol):
    """The feature store, as the data plane uses it."""


class EventProducer(EventLog, Thread, Protocol):
    """The producer of interactions."""


class ItemProducer(ItemLog, Thread, Protocol):
    """The producer of items."""


class ImpressionProducer(RecordSink, Thread, Protocol):
    """The producer of impressions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Everything outside the gateway that the data plane uses.

    `llms` holds the replicas of each served name. The data plane starts and stops the producers and closes
    `explanations`, `receipts` and `page_key`; the caller owns the other ports.
    """

    bundles: BundleStore
    load_student: Callable[[Bundle, Catalogue], Student]
    load_reader: Callable[[Bundle, Catalogue], WishReader | None] = lambda _bundle, _catalogue: None
    features: FeatureStore
    llms: Mapping[str, Llm]
    events: EventProducer
    impressions: ImpressionProducer
    explanations: ExplanationStore | None
    receipts: Receipts
    page_key: PageKey
    user_data: Callable[[str], Mapping[str, Any]]
    live_items: LiveItems
    item_reader: ItemReader
    item_log: ItemProducer
    registry: CollectorRegistry
    text_writer: TextWriter | None = None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneConfig:
    """The configuration of the data plane.

    `llm_beam_width`: number of items that a replica ranks at no extra cost. `surfaces_file`, `experiments_file`: paths,
    or None. `text_num_places`: completions that may be written at once. `num_llm_models`: models that the
    replicas together hold at all times, for a metric. `shadow_share`, `teacher_share`: fractions of answers that are
    ranked again. `llm_load_per_home`: see Placement; None where every replica holds every model.
    `residency`: None loads the bundles of all names at the start. `record_every_s`: see AnswerBatches.
    """

    deadlines: DeadlineLimits
    admission: AdmissionLimits
    feature_timeout_s: float
    llm_rule: LlmRule
    max_llm_in_flight: int
    first_llm_prediction_s: float
    breaker_failures: int
    breaker_open_s: float
    bundle_poll_s: float
    popular_refresh_s: float
    max_events_per_request: int
    broker_keeps: BrokerKeeps
    record_every_s: float = BATCH_EVERY_S
    shadow_share: float = 0.0
    teacher_share: float = 0.0
    text: TextLimits = field(default_factory=TextLimits)
    text_num_places: int = NUM_PLACES
    num_llm_models: int = 1
    llm_beam_width: int = 32
    llm_load_per_home: float | None = None
    residency: NameResidency | None = None
    surfaces_file: Path | None = None
    experiments_file: Path | None = None


def build_data_plane(ports: Ports, config: PlaneConfig) -> DataPlane:
    """Compose the data plane. Call in the event loop that will serve; starts nothing."""
    metrics = GatewayMetrics(ports.registry)
    metrics.llm_replicas_wanted.set(config.num_llm_models)
    metrics.bundle_store_lost.set_function(lambda: ports.bundles.is_lost)
    answer_metrics = AnswerMetrics(metrics)
    names = Names(
        [
            LiveBundle(
                ports.bundles.named(name),
                ports.load_student,
                config.bundle_poll_s,
                metrics,
                ports.live_items.of(tenant_of_name(name)),
                ports.load_reader,
            )
            for name in ports.llms
        ],
        ResidencyMetrics(ports.registry, "gateway"),
        config.bundle_poll_s,
        config.residency,
    )
    popular, similar = PopularTier(names, ports.features, config.popular_refresh_s), SimilarTier(names)
    gated = {name: GatedLlm(replicas, _gate(name, config)) for name, replicas in ports.llms.items()}
    llm = LlmTier(gated, config.llm_rule, config.llm_beam_width, metrics.breaker_open, ports.clock)
    surfaces = Surfaces(
        config.surfaces_file,
        tuple(ports.llms),
        lambda surface: _check_surface(surface, names),
        metrics.surfaces_state.set,
    )
    experiments = RunningExperiments(config.experiments_file, surfaces, metrics.experiments_state.set, ports.wall_clock)
    load = LoadMonitor(Admission(config.admission), metrics.strain, metrics.refused)
    explanations = Explanations(ports.explanations, metrics.explanations)
    pages = Pages(names, ports.page_key, ports.wall_clock)
    readers = WishReaders(names, _breaker(config), metrics.wishes, ports.clock)
    wishes = Wishes(readers, TitleSearch(names))
    text_report = TextReport(TextMetrics(ports.registry))
    text = _text_tier(ports, config, load, text_report)
    make_recommend = partial(
        Recommend,
        features=ports.features,
        tiers=(PrecomputedTier(), llm, StudentTier(ports.clock), similar),
        last=popular,
        load=load,
        pages=pages,
        wishes=wishes,
        compiling=LongWork("filters", num_threads=2),
        rationale=RationaleWriter(text, text_report.metrics.rationales, ports.wall_clock),
        limits=config.deadlines,
        feature_timeout_s=config.feature_timeout_s,
        clock=ports.clock,
        wall_clock=ports.wall_clock,
    )
    names.before_swap(lambda live: answer_metrics.bundle_loaded(live.name, live.version))
    names.before_swap(lambda live: _compile_surfaces(live, surfaces, names.first.name))
    again = StudentTier(ports.clock)  # a separate thread: no request waits behind a second ranking
    teacher = LlmTier(gated, _ANY_HISTORY, config.llm_beam_width, metrics.breaker_open, ports.clock)
    rankers = (
        CandidateRanker(
            share=config.shadow_share,
            agreement=metrics.candidate_agreement,
            beside=lambda live: names.of(live.name).beside(live),
            recommend_by=partial(make_recommend, tiers=(PrecomputedTier(), llm, again, similar)),
        ),
        TeacherRanker(
            share=config.teacher_share,
            agreement=metrics.teacher_agreement,
            recommend_by=partial(make_recommend, tiers=(PrecomputedTier(), teacher, again)),
            max_deadline_ms=config.deadlines.max_ms,
        ),
    )
    shadow = Shadow(rankers, load, metrics.shadow_samples, ports.clock)
    impressions = Impressions(ports.impressions, metrics.impressions, lambda name: names.of(name).canary is not None)
    batches = AnswerBatches((impressions.answered, answer_metrics.answered, log_answer), config.record_every_s)
    recommend = make_recommend(
        names=names,
        surfaces=experiments,
        failure_sinks=(impressions.failed,),
        sinks=(batches.answered, set_span_attributes, explanations.answered, *shadow.sinks),
    )
    preview = PreviewSurface(
        surfaces, lambda finder, sink: make_recommend(names=names, surfaces=finder, sinks=(sink,)), ports.clock
    )
    return DataPlane(
        Operations(
            recommend=recommend,
            recommend_batch=partial(RecommendBatch, recommend, ports.features),
            record=RecordEvents(ports.events, config.max_events_per_request, ports.wall_clock),
            items=ItemOperations(ports.item_log, ports.item_reader, ports.live_items, names.load_each),
            preview=preview,
            assign=Assign(names, experiments, ports.wall_clock),
            users=EraseUsers(ports.events, ports.receipts, config.broker_keeps, ports.wall_clock),
            export=ExportUser(ports.user_data),
        ),
        Bundles(names=names, surfaces=surfaces, experiments=experiments, pages=pages, wishes=wishes),
        Tiers(popular=popular, similar=similar, text=text),
        Records(
            metrics=answer_metrics,
            batches=batches,
            explanations=explanations,
            refusal_sinks=(answer_metrics.refused, log_refusal, explanations.refused),
            text_report=text_report,
            shadow=shadow,
        ),
        load,
        (ports.events, ports.impressions, ports.item_log),
        Clocks(monotonic=ports.clock, wall=ports.wall_clock),
    )


async def warm_up(features: Features, llms: Iterable[Llm]) -> None:
    """Open the first connection to the store and to a replica of each name before a request needs them. Never fails.

    The LLM refuses the request at once because its bundle does not exist.
    """
    request = RankRequest(
        request_id="warm-up",
        user_id=None,
        bundle_version="none",
        history_item_ids=(),
        k=1,
        budget_ms=_WARM_UP_S * 1_000,
    )
    ranking = (llm.rank(request, _WARM_UP_S) for llm in llms)
    for opening in (features.read("warm-up", "none", _WARM_UP_S), *ranking):
        with suppress(TailraceError):
            await opening


def _check_surface(surface: Surface, names: Names) -> None:
    """Reject a surface that names attributes unknown to its model's bundles. Raises InvalidRequest."""
    for live in names.of(surface.model).loaded:
        expressions = live.expressions
        if surface.filter is not None:
            expressions.check(surface.filter, f"{surface.name}.filter")
        check_rules(surface.rules, f"{surface.name}.rules", expressions)


def _compile_surfaces(live: Live, surfaces: Surfaces, first_name: str) -> None:
    """Compute the surface masks of this bundle before it serves.

    Otherwise the first requests would spend their deadlines on it.
    """
    for surface in surfaces.in_force.values():
        if (surface.model or first_name) == live.name:
            request = RecommendRequest(request_id="warm-up", subject=PopularIn(), surface=surface.name)
            live.expressions.compiled([clause for _, clause in clauses_of(surface.applied_to(request))])


def _text_tier(ports: Ports, config: PlaneConfig, load: LoadMonitor, report: TextReport) -> TextTier | None:
    if ports.text_writer is None:
        return None
    return TextTier(
        writer=ports.text_writer,
        breaker=_breaker(config),
        load=load,
        report=report,
        limits=config.text,
        num_places=config.text_num_places,
        wall_clock=ports.wall_clock,
    )


def _gate(name: str, config: PlaneConfig) -> LlmGate:
    def new_replica() -> Replica:
        return Replica(_breaker(config), LatencyPredictor(config.first_llm_prediction_s))

    placement = None if config.llm_load_per_home is None else Placement(name, config.llm_load_per_home)
    return LlmGate(new_replica, config.max_llm_in_flight, placement)


def _breaker(config: PlaneConfig) -> Breaker:
    return Breaker(config.breaker_failures, config.breaker_open_s)
