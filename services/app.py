"""The composition root: settings -> clients -> Ray Serve graph. The only file that imports every part.

    doors ── Gateway (one class, REST and gRPC) ── DataPlane ─┬─ FeatureReader (Redis)
                                                              ├─ student (this process)
                                                              ├─ producers (Kafka)
                                                              ├─ LlmHandle ──▶ LLM deployments, one per model name
                                                              └─ TextHandle ─▶ text deployment (optional)

Clients are built inside the replica, in its event loop. Importing this module loads neither Ray nor Feast nor torch.
"""

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import REGISTRY

from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from services.contracts.rank import RankRequest, RankResult
from services.contracts.text import TextEvent, TextModel, TextRequest, TextWriter
from services.errors import ConfigError, DependencyUnavailable
from services.features.erasing import RedisReceipts
from services.features.explanations import RedisExplanations
from services.features.page_key import FilePageKey, RedisPageKey
from services.features.rate_counts import RedisRateCounts
from services.features.reader import FeatureReader, read_event_times
from services.features.repo import RepoAddress, ensure_applied
from services.features.schema import USER_HISTORY
from services.features.user_data import UserStore
from services.garbage import freeze_start
from services.gateway.access.authorize import KeyedAccess, open_to_all
from services.gateway.access.keyring import KeyRing
from services.gateway.access.oidc import Issuer, IssuerKeys, TokenVerifier
from services.gateway.access.shared_rates import SharedRates
from services.gateway.access.tenants import FollowedTenants
from services.gateway.autoscale import LATE_SHARE
from services.gateway.build import FeatureStore, PlaneConfig, Ports, build_data_plane, warm_up
from services.gateway.call.guard import Access
from services.gateway.call.http import HttpApp
from services.gateway.call.operations import METHODS
from services.gateway.console.door import add_console
from services.gateway.console.editor import add_editor
from services.gateway.console.releases import add_releases
from services.gateway.console.service import ConsoleService, build_console
from services.gateway.data_plane import DataPlane
from services.gateway.drills import DrillableStore, DrilledLlm, DrilledStore, Drills
from services.gateway.events.producer import TopicProducer
from services.gateway.grpc.acceptance import accept_many_calls
from services.gateway.grpc.door import RpcDoor
from services.gateway.openai.remote.client import RemoteWriter
from services.gateway.overload.admission import AdmissionLimits
from services.gateway.request.names import NameResidency
from services.gateway.request.pages import PageKey
from services.gateway.rest.acceptance import accept_many_connections
from services.gateway.rest.door import create_rest_app
from services.gateway.text.tier import GRACE_S, NUM_PLACES, TextLimits
from services.gateway.tiers.llm import Llm
from services.gateway.users.erase import BrokerKeeps
from services.items.follower import ItemFollower
from services.items.live_items import Knowledge, LiveItems
from services.llm.remote import RemoteLlm
from services.observability.log_lines import configure_logging
from services.observability.metrics import AccessMetrics, ItemsMetrics, ProcessMetrics
from services.observability.node_metrics import node_registry, render_metrics
from services.observability.tracing import open_tracing
from services.router.deadline import DeadlineLimits
from services.router.policy import LlmRule
from services.settings.addresses import read_secret
from services.settings.kafka_topics import DEAD_LETTERS_KEEP_MS, EVENTS_KEEP_MS
from services.settings.settings import Settings, load_settings
from services.stream.export import UserExport
from services.student.ranker import load_student
from services.wishes.encoder import load_encoder

if TYPE_CHECKING:
    from ray.serve import Application

log = structlog.get_logger()

GRPC_SERVICERS = (
    "services.gateway.grpc.door.add_recommender_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
"""Ray Serve registers these methods at its gRPC server; calls reach the methods of `Gateway` by name."""

_IMPRESSIONS_GATHER_S = 0.2
"""Impressions are sent in batches: sending each immediately would cost a gateway a quarter of its time."""

_ACK_TIMEOUT_S = 2.0
_EVENTS_MAX_IN_FLIGHT = 256
"""Calls with events that await the broker in one gateway; further calls are refused."""
_FIRST_LLM_PREDICTION_S = 0.05
_ABSENT_RETRY_AFTER_S = 5.0
_LOOK_S = 0.2
_MIN_PAGE_KEY_BYTES = 16


class Gateway:
    """Both doors of one replica: HTTP through the ASGI app, gRPC through one method for each of METHODS."""

    def __init__(self, settings: Settings, llms: Mapping[str, Any], text: Any | None = None) -> None:
        configure_logging(settings.log_level, "gateway", settings.log_file)
        accept_many_connections()
        accept_many_calls(lambda: self._plane.edge.news() if self._plane else None)
        self._settings = settings
        self._llms = llms_of(settings, llms)
        self._writer = text_writer(settings, text)
        self._plane: DataPlane | None = None
        self._console: ConsoleService | None = None
        self._access = open_access(settings)
        self._tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, "tailrace-gateway")
        self._rpc = RpcDoor(self._running_plane, settings.max_body_bytes, self._access, self._tracing)

    async def __serve_build_asgi_app__(self) -> HttpApp:
        """Build the data plane in the serving loop, then the REST door; Ray Serve calls this before any request."""
        features = open_features(self._settings)
        drills = Drills(self._settings.drills_file)
        store, llms = _drilled(self._settings, drills, features, self._llms)
        self._plane = build_plane(self._settings, store, llms, self._writer)
        await self._plane.start()
        await _items_known(self._plane)
        await self._access.start()
        await warm_up(features, set(self._llms.values()))
        freeze_start()
        folder = self._settings.metrics_dir
        app = create_rest_app(
            self._running_plane,
            lambda: render_metrics(folder),
            self._settings.max_body_bytes,
            access=self._access,
            tracing=self._tracing,
        )
        if self._settings.console:
            self._console = _console(self._settings, self._plane, store, drills)
            await self._console.start()
            add_console(app, self._console)
            add_editor(app, self._running_plane)
            add_releases(app, BundleStore.of(self._settings), self._settings.release_lead_s, time.time)
        return app

    async def Check(self, request: Any, grpc_context: Any) -> Any:
        """`grpc.health.v1.Health/Check`."""
        return await self._rpc.Check(request, grpc_context)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metric of `services.gateway.autoscale`; Ray Serve's autoscaler calls this at intervals."""
        return {LATE_SHARE: self._plane.take_late_share() if self._plane else 0.0}

    async def __del__(self) -> None:
        """Close the doors and clients; Ray Serve awaits this when it stops the replica gracefully."""
        log.info("stopping")
        if self._console is not None:
            await self._console.stop()
        if self._plane is not None:
            await self._plane.stop()
        await _close(self._writer, *set(self._llms.values()))
        await self._access.stop()
        await asyncio.to_thread(self._tracing.stop)
        gc.unfreeze()  # or libraries report leaked objects when the interpreter exits

    def _running_plane(self) -> DataPlane:
        assert self._plane is not None, "Ray Serve builds the app before it opens the doors"
        return self._plane


def _rpc_method(name: str) -> Callable[[Gateway, bytes, Any], Awaitable[Any]]:
    """Return the method of the gRPC door with this name."""

    async def method(self: Gateway, request: bytes, grpc_context: Any) -> Any:
        return await getattr(self._rpc, name)(request, grpc_context)

    method.__name__ = name
    return method


for _name in METHODS:
    setattr(Gateway, _name, _rpc_method(_name))


async def _items_known(plane: DataPlane) -> None:
    """Wait until item states are known: meanwhile Ray sends this replica no request, and other gateways answer."""
    if plane.items.knowledge is Knowledge.NONE:
        log.warning("items_awaited")
    while plane.items.knowledge is Knowledge.NONE:  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def open_standby(settings: Settings) -> AsyncIterator[tuple[HttpApp, RpcDoor]]:
    """Yield both doors, without Ray and without an LLM, on the same data plane, keys, limits, drills and metrics.

    The standby's LLM and text model always raise the error of an unavailable model. Its breaker never opens: it has no
    LLM to protect, and the breaker metric describes the real LLM.
    """
    alone = settings.model_copy(update={"gateway_replicas": 1, "breaker_failures": sys.maxsize})
    features, drills, access = open_features(alone), Drills(alone.drills_file), open_access(alone, is_peer=False)
    tracing = open_tracing(alone.otlp_endpoint, alone.trace_share, "tailrace-standby")
    writer = AbsentText() if alone.text_path else text_writer(alone, None)
    llms = dict.fromkeys(alone.served_names, AbsentLlm())
    plane = build_plane(alone, DrilledStore(features, drills), llms, writer, part="standby")
    for part in (plane, drills, access):
        await part.start()
    await warm_up(features, ())
    folder = alone.metrics_dir
    app = create_rest_app(
        lambda: plane,
        lambda: render_metrics(folder),
        alone.max_body_bytes,
        access=access,
        tracing=tracing,
        echoes_request_id=True,
    )
    try:
        yield app, RpcDoor(lambda: plane, alone.max_body_bytes, access, tracing)
    finally:
        for part in (plane, drills, access):
            await part.stop()
        await _close(writer)
        await asyncio.to_thread(tracing.stop)


class AbsentLlm:
    """The standby's LLM, which is never available."""

    def replicas(self) -> Sequence[str]:
        return ()

    async def rank(self, request: RankRequest, timeout_s: float) -> RankResult:
        raise DependencyUnavailable("llm", _ABSENT_RETRY_AFTER_S)


class AbsentText:
    """The standby's text model, which is never available."""

    async def models(self) -> tuple[TextModel, ...]:
        raise DependencyUnavailable("text", _ABSENT_RETRY_AFTER_S)

    def write(self, request: TextRequest) -> AsyncIterator[TextEvent]:
        raise DependencyUnavailable("text", _ABSENT_RETRY_AFTER_S)


def build_app(settings: Settings) -> "Application":
    """Bind the graph: the gateway, an LLM deployment per name without `llm_url`, a text one with `text_path`."""
    from ray import serve
    from ray.serve.config import BackpressureConfig

    from services.llm.applications import build_llms, build_text

    deployment = serve.deployment(
        name="Gateway",
        num_replicas=settings.gateway_replicas,
        # our own admission decides long before Ray's queue fills
        max_ongoing_requests=4 * settings.gateway_max_ongoing,
        max_queued_requests=settings.gateway_max_ongoing,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=5,
        # our own log line has more fields; below this level Ray Serve would make a record per request, and drop it
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(serve.ingress()(Gateway))
    text = build_text(settings) if settings.text_path else None
    application: Application = deployment.bind(settings, {} if settings.llm_url else build_llms(settings), text)
    return application


def build_from_environment(_args: dict[str, str]) -> "Application":
    """Bind the graph from `TAILRACE_*`; a Serve config names this function as its import path."""
    return build_app(load_settings())


def open_access(settings: Settings, *, is_peer: bool = True) -> Access:
    """Read the API keys and create their rate counter; without a keys file everybody is admitted. Raises ConfigError.

    `is_peer`: whether this process is a gateway that takes its part of each key's limits while Redis is unavailable.
    """
    if settings.api_keys_file is None:
        return open_to_all(settings.max_k, settings.own_names)
    metrics, num_processes = AccessMetrics(REGISTRY), settings.gateway_replicas
    keys = KeyRing(settings.api_keys_file, settings.max_k, on_state=metrics.keys_state.set)
    tenants = FollowedTenants(settings.tenants_file, on_state=metrics.tenants_state.set)
    counts = RedisRateCounts(settings.redis_address, is_peer=is_peer)
    rates = SharedRates(counts, num_processes, on_unavailable=metrics.rate_counts_unavailable.set)
    return KeyedAccess(keys, tenants, rates, tokens=_token_verifier(settings))


def _token_verifier(settings: Settings) -> TokenVerifier | None:
    if not settings.oidc_issuer:
        return None
    issuer = Issuer(
        url=settings.oidc_issuer,
        audience=settings.oidc_audience,
        tenant_claim=settings.oidc_tenant_claim,
        scope_claim=settings.oidc_scope_claim,
    )
    return TokenVerifier(issuer, settings.max_k, IssuerKeys(issuer.url), time.monotonic)


def open_features(settings: Settings) -> FeatureReader:
    """Open the feature store without connecting."""
    address = _address(settings)
    ensure_applied(address)
    return FeatureReader(address, settings.topic_partitions)


def _address(settings: Settings) -> RepoAddress:
    return RepoAddress(settings.feature_repo_dir, settings.redis_address)


def _drilled(
    settings: Settings, drills: Drills, features: FeatureReader, llms: Mapping[str, Llm]
) -> tuple[DrillableStore, Mapping[str, Llm]]:
    """Wrap the ports with the console's drills, if there is a console."""
    if not settings.console:
        return features, llms
    return DrilledStore(features, drills), {name: DrilledLlm(llm, drills) for name, llm in llms.items()}


def _console(settings: Settings, plane: DataPlane, store: DrillableStore, drills: Drills) -> ConsoleService:
    """Build the console's service without starting it."""
    bundles, table = BundleStore.of(settings), _address(settings).table_path(USER_HISTORY.name)
    return build_console(
        live=plane.names.first,
        users=store,
        event_times=lambda user_id: read_event_times(table, user_id),
        scrape=lambda: node_registry(settings.metrics_dir).collect(),
        drills=drills,
        read_report=lambda version: bundles.described(version, with_report=True).report(),
        default_deadline_ms=settings.default_deadline_ms,
        llm_needs_gain=settings.llm_routing == "gain",
    )


def text_writer(settings: Settings, text: Any | None) -> TextWriter | None:
    """Return the text writer, if any: another server, or our own deployment behind this Ray handle."""
    if settings.text_url:
        key = partial(_url_key, "TEXT_URL_KEY_FILE", settings.text_url_key_file)
        return RemoteWriter(settings.text_url, key, only_model=settings.text_model)
    if text is None:
        return None
    from services.llm.handles import TextHandle

    return TextHandle(text, settings.text_deadline_ms / 1_000)


def llms_of(settings: Settings, handles: Mapping[str, Any]) -> Mapping[str, Llm]:
    """Return the LLM of each served name: another server, or our own deployments behind these Ray handles."""
    if settings.llm_url:
        key = partial(_url_key, "LLM_URL_KEY_FILE", settings.llm_url_key_file)
        return dict.fromkeys(settings.served_names, RemoteLlm(settings.llm_url, key, settings.default_beam_width))
    from services.llm.handles import LlmHandle

    llms = {name: LlmHandle(handle) for name, handle in handles.items()}
    shared = llms[settings.first_name]  # the only one, if all names share their replicas
    return {name: llms.get(name, shared) for name in settings.served_names}


def _url_key(setting: str, key_file: Path | None) -> str:
    """Return another server's API key, empty without a file.

    Raises ConfigError that names setting and file but never the key.
    """
    if key_file is None:
        return ""
    key = read_secret(key_file, f"TAILRACE_{setting}")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"TAILRACE_{setting}: secret file {key_file}: a key is one line of printable ASCII")
    return key


async def _close(*clients: object) -> None:
    for client in clients:
        if isinstance(client, RemoteWriter | RemoteLlm):
            await client.close()


def build_plane(
    settings: Settings,
    features: FeatureStore,
    llms: Mapping[str, Llm],
    writer: TextWriter | None = None,
    part: str = "gateway",
) -> DataPlane:
    """Compose the data plane of one process on real ports. Call in the event loop that will serve; starts nothing.

    `llms` maps every served model name to its LLM; requests without a name go to the first. `part` names the process in
    the metrics.
    """
    ProcessMetrics(REGISTRY, part)
    live_items = LiveItems()
    ports = Ports(
        bundles=BundleStore.of(settings),
        load_student=load_student,
        load_reader=partial(Bundle.wish_reader, load_encoder=load_encoder),
        features=features,
        llms=llms,
        events=_producer(settings, settings.interactions_topic, _EVENTS_MAX_IN_FLIGHT),
        impressions=_producer(
            settings, settings.impressions_topic, settings.impressions_max_in_flight, _IMPRESSIONS_GATHER_S
        ),
        explanations=_explanation_store(settings),
        receipts=RedisReceipts(settings.redis_address),
        page_key=_page_key(settings),
        user_data=UserExport(
            UserStore(_address(settings)),
            settings.offline_log_dir,
            settings.topic_partitions,
            BundleStore.of(settings).versions,
        ),
        live_items=live_items,
        item_reader=follow_items(settings, live_items),
        item_log=_producer(settings, settings.items_topic, _EVENTS_MAX_IN_FLIGHT),
        registry=REGISTRY,
        text_writer=writer,
    )
    return build_data_plane(ports, plane_config(settings))


def follow_items(settings: Settings, live_items: LiveItems) -> ItemFollower:
    """Return the follower that keeps the live catalogue up to date with its topic, not started yet."""
    metrics = ItemsMetrics(REGISTRY)
    return ItemFollower(
        live_items,
        settings.kafka_address,
        settings.items_topic,
        settings.items_snapshot,
        arrivals_dir=settings.arrivals_dir,
        on_refused=metrics.refused.inc,
        on_unavailable=metrics.unavailable.set,
        on_left_out=metrics.left_out.inc,
        on_knowledge=metrics.knowledge.set,
    )


def _residency(settings: Settings) -> NameResidency | None:
    """Return how a gateway loads names when they are asked for; None if it loads all at its start."""
    if settings.llm_memory_gib is None:
        return None
    return NameResidency(
        budget_bytes=None if settings.student_memory_gib is None else int(settings.student_memory_gib * 2**30),
        min_stay_s=settings.llm_min_stay_s,
        pinned=frozenset(settings.resident_names),
    )


def plane_config(settings: Settings) -> PlaneConfig:
    return PlaneConfig(
        deadlines=DeadlineLimits(
            default_ms=settings.default_deadline_ms,
            min_ms=settings.min_deadline_ms,
            max_ms=settings.max_deadline_ms,
            reserve_ms=settings.deadline_reserve_ms,
        ),
        admission=AdmissionLimits.for_deadline(
            settings.gateway_max_ongoing, settings.default_deadline_ms / 1_000, settings.gateway_replicas
        ),
        feature_timeout_s=settings.feature_timeout_ms / 1_000,
        llm_rule=LlmRule(min_history=settings.min_history_for_llm, needs_gain=settings.llm_routing == "gain"),
        max_llm_in_flight=settings.max_llm_in_flight,
        first_llm_prediction_s=_FIRST_LLM_PREDICTION_S,
        breaker_failures=settings.breaker_failures,
        breaker_open_s=settings.breaker_open_s,
        bundle_poll_s=settings.bundle_poll_s,
        popular_refresh_s=settings.popular_refresh_s,
        max_events_per_request=settings.max_events_per_request,
        num_llm_models=0
        if settings.llm_url
        else settings.llm_replicas
        * len(settings.served_names if settings.llm_memory_gib is None else settings.resident_names),
        llm_beam_width=settings.default_beam_width,
        llm_load_per_home=None if settings.llm_memory_gib is None else settings.llm_load_per_home,
        residency=_residency(settings),
        surfaces_file=settings.surfaces_file,
        experiments_file=settings.experiments_file,
        shadow_share=settings.shadow_share,
        teacher_share=settings.teacher_share,
        broker_keeps=BrokerKeeps(events_ms=EVENTS_KEEP_MS, dead_letters_ms=DEAD_LETTERS_KEEP_MS),
        text=TextLimits(
            max_tokens=settings.text_max_tokens,
            max_choices=settings.text_max_choices,
            deadline_ms=settings.text_deadline_ms,
            grace_s=0.0 if settings.text_url else GRACE_S,
        ),
        text_num_places=NUM_PLACES * (settings.text_replicas if settings.text_path else 1),
    )


def _page_key(settings: Settings) -> PageKey:
    """Return the source of the key that signs page tokens. Raises ConfigError for a bad file."""
    if settings.page_key_file is None:
        return RedisPageKey(settings.redis_address)
    key = read_secret(settings.page_key_file, "TAILRACE_PAGE_KEY_FILE").encode()
    if len(key) < _MIN_PAGE_KEY_BYTES:
        raise ConfigError(f"TAILRACE_PAGE_KEY_FILE: {len(key)} bytes; write at least {_MIN_PAGE_KEY_BYTES}")
    return FilePageKey(key)


def _explanation_store(settings: Settings) -> RedisExplanations | None:
    if not settings.explain_keep_s:
        return None
    return RedisExplanations(settings.redis_address, settings.explain_keep_s, settings.explain_max_bytes)


def _producer(settings: Settings, topic: str, max_in_flight: int, gather_s: float = 0.0) -> TopicProducer:
    return TopicProducer(
        settings.kafka_address,
        topic,
        _ACK_TIMEOUT_S,
        max_in_flight,
        gather_s,
        None if gather_s else settings.arrivals_dir,
    )
