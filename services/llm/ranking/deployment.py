"""The LLM as a Ray Serve deployment: rank requests in, results or refusals out, around one engine per live bundle.

It holds no rule of its own: versions and deadlines are checked here, order and admission belong to the engine, and what
a refusal means to the user is decided by the router. Sticky by user: see `services.llm.ranking.handle`.
"""

import time
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.config import RequestRouterConfig

from models.registry import Bundle, BundleStore
from services.contracts.rank import RankRequest
from services.errors import BundleMismatch, DeadlineExceeded, TailraceError
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.machine_limits import measure_limits
from services.llm.engine.outcome import Status
from services.llm.ranking.bundle_watch import BundleWatch
from services.llm.ranking.model import LoadedBundle, load_bundle
from services.llm.serving.engine_thread import EngineThread
from services.llm.serving.metrics import EngineStepMetrics, record_spans
from services.llm.serving.reply import Reply, refusal_of
from services.observability.metrics import EngineMetrics, ProcessMetrics, configure_logging
from services.observability.tracing import note, note_failure, open_tracing
from services.settings.settings import Settings

_STICKY_ROUTER = "services.llm.serving.sticky_router.StickyRouter"
_MODEL_NAME = "ranker"
"""What the metrics call the model that ranks, whatever its bundle."""


class LlmDeployment:
    """One replica. Comes up without a bundle too, and serves as soon as one is live."""

    def __init__(self, settings: Settings) -> None:
        configure_logging(settings.log_level)
        torch.set_num_threads(settings.llm_threads)
        self._tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, "tailrace-llm")
        self._settings = settings
        self._version: str | None = None
        registry = CollectorRegistry()
        self._metrics = EngineMetrics(registry)
        ProcessMetrics(registry, "llm")
        self._limits = measure_limits(torch.device(settings.llm_device), getattr(torch, settings.llm_dtype))
        config = engine_config(settings)
        self._metrics.cache_config.labels(_MODEL_NAME, str(config.block_tokens), str(config.num_blocks)).set(1)
        self._watch = BundleWatch(BundleStore(settings.bundle_root), settings.bundle_poll_s, self._load, self._start)

    def __del__(self) -> None:
        """Ray Serve calls this when it stops the replica; what is in flight may finish."""
        if hasattr(self, "_watch"):
            self._watch.stop()
            self._tracing.stop()

    async def rank(self, request: RankRequest) -> Reply:
        """Spell the next items for one user. Cancelling this call cancels the work."""
        with self._tracing.continuation("llm.rank", request.trace):
            note({"tailrace.request_id": request.request_id})
            return await self._rank(request)

    async def _rank(self, request: RankRequest) -> Reply:
        try:
            serving = self._watch.current()
            if request.bundle_version != serving.bundle.version:
                raise BundleMismatch(request.bundle_version, serving.bundle.version)
            deadline_s = time.monotonic() + request.deadline_unix_s - time.time()
            ended = await serving.thread.run_request(serving.bundle.engine_call(request, deadline_s))
            record_spans(ended)
            if ended.outcome.status is not Status.DONE:
                raise DeadlineExceeded("llm")
            return serving.bundle.result_of(ended)
        except TailraceError as error:
            note_failure(type(error).__name__, is_ours=True)
            return refusal_of(error)

    def check_health(self) -> None:
        """Tell Ray Serve whether this replica should go on; raises when its engine died."""
        self._watch.check_health()

    def _load(self, bundle: Bundle) -> LoadedBundle:
        settings = self._settings
        dtype: torch.dtype = getattr(torch, settings.llm_dtype)
        return load_bundle(bundle, engine_config(settings), dtype, settings.llm_device)

    def _start(self, bundle: LoadedBundle) -> EngineThread:
        if self._version is not None:
            self._metrics.replicas.labels(self._version).set(0)
        self._version = bundle.version
        self._metrics.replicas.labels(bundle.version).set(1)
        report = EngineStepMetrics(self._metrics, bundle.engine, _MODEL_NAME, self._limits)
        return EngineThread(bundle.engine, self._settings.llm_threads, report.record)


def engine_config(settings: Settings) -> EngineConfig:
    """Pick the engine's knobs out of the settings."""
    return EngineConfig(
        block_tokens=settings.kv_block_tokens,
        num_blocks=settings.kv_num_blocks,
        kv_kind=settings.kv_kind,
        max_num_batched_tokens=settings.max_step_tokens,
        max_beam_rows=settings.max_beam_rows,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        tile_tokens=32 * settings.kv_block_tokens,
    )


def replica_options(router: str) -> dict[str, Any]:
    """Say what Ray Serve is told of any engine's replicas: they reserve no core, are chosen by this router, and are asked each second."""
    return {
        "ray_actor_options": {"num_cpus": 0},
        "request_router_config": RequestRouterConfig(request_router_class=router),  # type: ignore[arg-type]  # its stub says dict
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
    }


def build_llm(settings: Settings) -> Any:
    """Bind the LLM's Ray Serve application; its handle goes to `LlmHandle`."""
    deployment = serve.deployment(
        name="llm",
        num_replicas=settings.llm_replicas,
        max_ongoing_requests=settings.max_running + settings.max_waiting,
        max_queued_requests=settings.max_waiting,
        graceful_shutdown_timeout_s=2.0,
        **replica_options(_STICKY_ROUTER),
    )(LlmDeployment)
    return deployment.bind(settings)
