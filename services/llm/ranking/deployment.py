"""The ranking models of one or many names as a Ray Serve deployment, with an engine for each decoder that they serve.

A replica of one name loads it at its start. A replica of many names has a budget of memory: it loads a name when it is
first asked for it, and refuses that name's requests meanwhile. Requests go in, results or refusals come out. The
deployment checks versions and deadlines; order and admission belong to the engine, and the router decides how to answer
the user after a refusal. Requests of one user go to one replica: see `services.llm.serving.affinity_router`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import structlog
import torch
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.exceptions import RayServeException

from models.registry.bundle import Bundle
from models.registry.bundle_follower import Serving
from models.registry.name_record import DEFAULT_NAME
from models.registry.store import BundleStore
from services.contracts.rank import RankRequest, RankResult
from services.contracts.tenant import local_name, tenant_of_name
from services.errors import (
    BundleNotFound,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    ModelLoading,
    TailraceError,
)
from services.garbage import freeze_start
from services.items.follower import ITEMS_START_S, ItemFollower
from services.items.live_items import Knowledge, LiveItems
from services.llm.engine.config import EngineConfig, WeightKind
from services.llm.engine.kv.memory import KvMemory
from services.llm.engine.outcome import SequenceStatus
from services.llm.ranking.engines import Engines, EngineSource
from services.llm.ranking.model import LoadedBundle, load_bundle
from services.llm.ranking.shared_engines import EngineNeed, RunningBundle, SharedEngines, engine_for
from services.llm.serving.card import KvPoolSize, check_support, limits_of, open_card
from services.llm.serving.engine_thread import EngineThread
from services.llm.serving.metrics import EngineStepMetrics, record_spans
from services.llm.serving.reply import Reply, refusal_of
from services.llm.serving.streams import FinishedRequest
from services.observability.log_lines import configure_logging
from services.observability.metrics import EngineMetrics, ItemsMetrics, ProcessMetrics, ResidencyMetrics
from services.observability.tracing import note, note_failure, open_tracing
from services.residency.residents import Residents
from services.residency.state import ModelBytes, ResidencyTable
from services.settings.settings import Settings

log = structlog.get_logger()

_CPU_BLOCKS = 4_096
_MODEL_NAME = "ranker"
"""Name of the ranking model in the metrics, the same for all bundles."""
_RETRY_AFTER_S = 1.0
_STEPS_PER_LONGEST = 10
"""A step is planned to take this fraction of the time after which it may count as hung."""


class LlmDeployment:
    """One replica of these names. It also starts without a bundle, and serves as soon as a version is live."""

    _is_running = False
    """Set from the end of the start to the stop: the collector calls `__del__` again after Ray Serve."""

    def __init__(self, settings: Settings, names: Sequence[str] = (DEFAULT_NAME,)) -> None:
        configure_logging(settings.log_level, "llm", settings.log_file)
        torch.set_num_threads(settings.llm_threads)
        self._tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, "tailrace-llm")
        self._settings = settings
        self._names, self._replica = frozenset(names), replica_name()
        self._reported: dict[str, set[tuple[str, str, str]]] = {}
        registry = CollectorRegistry()
        self._metrics = EngineMetrics(registry)
        ProcessMetrics(registry, "llm")
        self._pool = ranking_pool(settings)
        self._limits = limits_of(self._pool.card, settings.llm_device, settings.llm_dtype)
        self._items = LiveItems()
        self._shared = SharedEngines()
        self._models = self._open_models(ResidencyMetrics(registry, "llm"))
        freeze_start()
        self._models.start()
        items_metrics = ItemsMetrics(registry)
        self._item_follower = ItemFollower(
            self._items,
            settings.kafka_address,
            settings.items_topic,
            settings.items_snapshot,
            arrivals_dir=settings.arrivals_dir,
            on_refused=items_metrics.refused.inc,
            on_unavailable=items_metrics.unavailable.set,
            on_knowledge=items_metrics.knowledge.set,
        )
        self._item_follower.start(ITEMS_START_S)
        self._is_running = True

    def __del__(self) -> None:
        """Stop the replica; requests in flight may finish. Called by Ray Serve."""
        if self._is_running:
            self._is_running = False
            log.info("stopping")
            self._models.stop()
            self._item_follower.stop()
            self._tracing.stop()

    async def rank(self, request: RankRequest) -> Reply:
        """Rank the next items for one user. Cancelling this call cancels the request in the engine."""
        with self._tracing.continuation("llm.rank", request.trace):
            note({"tailrace.request_id": request.request_id})
            return await self._rank(request)

    async def _rank(self, request: RankRequest) -> Reply:
        try:
            with self._engines_of(request.name) as engines:
                return await self._rank_with(engines, request)
        except TailraceError as error:
            note_failure(type(error).__name__, is_ours=True)
            return refusal_of(error)

    @contextmanager
    def _engines_of(self, name: str) -> Iterator[Engines]:
        """Yield the engines of a name, which stay in memory meanwhile. Raises BundleNotFound or ModelLoading."""
        if name not in self._names:
            raise BundleNotFound(f"this replica does not serve {name:.100}")
        engines = self._models.acquire(name)
        if engines is None:
            raise ModelLoading(name)
        try:
            yield engines
        finally:
            self._models.release(name)

    async def _rank_with(self, engines: Engines, request: RankRequest) -> RankResult:
        running = engines.of(request.bundle_version)
        if self._items.knowledge is Knowledge.NONE:  # hidden items would be ranked
            raise DependencyUnavailable("states of items", _RETRY_AFTER_S)
        deadline_s = time.monotonic() + request.budget_ms / 1_000
        await running.bundle.shown.compile(request.filters, deadline_s)
        ended = await self._run(engines, running, request, deadline_s)
        record_spans(ended)
        if ended.outcome.status is SequenceStatus.FAILED:
            log.error("ranking_failed", name=request.name, version=request.bundle_version)
            raise DependencyUnavailable(f"the model of {local_name(request.name)}", _RETRY_AFTER_S)
        if ended.outcome.status is not SequenceStatus.DONE:
            raise DeadlineExceeded("llm")
        return replace(running.bundle.result_of(ended), replica=self._replica)

    async def _run(
        self, engines: Engines, running: RunningBundle, request: RankRequest, deadline_s: float
    ) -> FinishedRequest:
        try:
            return await running.thread.run_request(running.bundle.engine_call(request, deadline_s))
        except (DependencyUnavailable, InvalidRequest):
            engines.of(request.bundle_version)  # raises BundleMismatch if its thread or its adapter has gone meanwhile
            raise

    def check_health(self) -> None:
        """Raise when an engine hangs or has died, or names are no longer followed. Ray Serve's health check."""
        for engines in self._models.models():
            engines.check_health(self._settings.engine_max_step_s)
        if not self._models.is_alive:
            raise RuntimeError("the thread that follows the names died")

    def _open_models(self, metrics: ResidencyMetrics) -> Residents[Engines]:
        """Return the models of this replica's names; without a budget all are pinned."""
        settings = self._settings
        if settings.llm_memory_gib is None:
            table, size_of = ResidencyTable(pinned=self._names, max_loading=1, tenant_of=tenant_of_name), None
        else:
            size_of = self._size_of
            table = ResidencyTable(
                int(settings.llm_memory_gib * 2**30),
                settings.llm_min_stay_s,
                self._names.intersection(settings.resident_names),
                settings.llm_idle_s or None,
                max_loading=1,
                tenant_of=tenant_of_name,
            )
        source = EngineSource(BundleStore.of(settings), self._start, self._report, size_of, self._resize)
        return Residents(table, source, metrics, settings.bundle_poll_s)

    def _resize(self, name: str, size: ModelBytes) -> bool:
        return self._models.resize(name, size)

    def _size_of(self, bundle: Bundle) -> ModelBytes:
        return self._need_of(bundle).size if bundle.is_trained else ModelBytes(0)

    def _need_of(self, bundle: Bundle) -> EngineNeed:
        return engine_for(bundle, engine_config(self._settings), getattr(torch, self._settings.llm_dtype).itemsize)

    def _start(self, name: str, bundle: Bundle, memories: Sequence[KvMemory]) -> RunningBundle | None:
        """Load a bundle of a name and run its engine, in the KV memory of another engine if it fits."""
        if not bundle.is_trained:
            return None
        settings, need, items = self._settings, self._need_of(bundle), self._items.of(tenant_of_name(name))

        def start() -> tuple[LoadedBundle, EngineThread]:
            dtype: torch.dtype = getattr(torch, settings.llm_dtype)
            config, device, merges = with_weights_of(bundle, settings), settings.llm_device, not need.adapter
            loaded = load_bundle(bundle, config, dtype, device, self._pool, memories, items, with_adapter=merges)
            report = EngineStepMetrics(self._metrics, loaded.engine, _MODEL_NAME, self._limits)
            return loaded, EngineThread(loaded.engine, settings.llm_threads, report.record)

        return self._shared.run(bundle, need, start, items)

    def _report(self, name: str, serving: Serving[RunningBundle | None]) -> None:
        """Report a name's running versions by role; a promoted canary changes its role."""
        running = {version for version, bundle in serving.loaded.items() if bundle is not None}
        roles = {(version, name, "live" if version == serving.live else "canary") for version in running}
        before = self._reported.get(name, set())
        for labels, value in (*((role, 0) for role in before - roles), *((role, 1) for role in roles)):
            self._metrics.replicas.labels(*labels).set(value)
        self._reported[name] = roles


def replica_name() -> str:
    """Return this replica's name in the routers; empty outside Ray Serve."""
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return ""


def engine_config(settings: Settings) -> EngineConfig:
    return EngineConfig(
        block_tokens=settings.kv_block_tokens,
        num_blocks=settings.kv_num_blocks or _CPU_BLOCKS,
        kv_kind=settings.kv_kind,
        weight_kind="model" if settings.llm_weight_kind == "bundle" else settings.llm_weight_kind,
        max_num_batched_tokens=settings.max_step_tokens,
        max_chunk_tokens=settings.max_chunk_tokens,
        max_beam_rows=settings.max_beam_rows,
        target_step_s=settings.engine_max_step_s / _STEPS_PER_LONGEST,
        adapter_memory_mib=settings.llm_adapter_memory_mib,
        adapter_rank=settings.llm_adapter_rank,
        tensor_parallel_size=settings.llm_tensor_parallel_size,
        rank_timeout_s=settings.engine_max_step_s,
        default_beam_width=settings.default_beam_width,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        tile_tokens=32 * settings.kv_block_tokens,
    )


def with_weights_of(bundle: Bundle, settings: Settings) -> EngineConfig:
    """Return the ranking engine's configuration with the weight format of a setting, or else of this bundle's manifest.

    A GPU and several ranks support only the model's dtype. Raises ConfigError for another unsupported format.
    """
    config = engine_config(settings)
    if settings.llm_weight_kind != "bundle" or bundle.weight_kind == "model":
        return config
    if settings.llm_device != "cpu" or config.tensor_parallel_size > 1:
        log.warning(
            "weights_in_model_dtype", version=bundle.version, named=bundle.weight_kind, device=settings.llm_device
        )
        return config
    return replace(config, weight_kind=cast("WeightKind", bundle.weight_kind))


def ranking_pool(settings: Settings) -> KvPoolSize:
    """Return the size of the ranking engines' KV pools.

    Raises ConfigError if the device does not support the settings.
    """
    card = open_card(settings.llm_device)
    check_support(card, "TAILRACE_LLM_DTYPE", settings.llm_dtype, settings.kv_kind)
    return KvPoolSize(card, "TAILRACE_KV_NUM_BLOCKS", settings.kv_num_blocks, settings.kv_memory_share)
