"""Every metric on one screen, and the logging configuration.

All processes of a node share a folder (prometheus-client's multi-process mode): each writes its own file there and one
endpoint sums them, so that every replica is counted once. The variable that names the folder (`PROMETHEUS_MULTIPROC_DIR`)
must be set before Python starts. Without it (unit tests) the metrics live in the process. Engine metrics carry vLLM's names,
so that its dashboards work unchanged.
"""

import logging
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.observability.node_metrics import NodeCollector

REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1, 2, 5)
TEXT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
ENGINE_BUCKETS_S = (*REQUEST_BUCKETS_S, 10, 20, 60)
STAGE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1)
FRESHNESS_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1, 2.5, 5, 10, 60)
AGE_BUCKETS_S = (0.1, 0.25, 1, 5, 30, 60, 300, 3_600, 86_400, 604_800, 2_592_000)
LIST_AGE_BUCKETS_S = (3_600, 21_600, 43_200, 86_400, 172_800, 259_200, 604_800, 1_209_600, 2_592_000)
SHARE_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class ProcessMetrics:
    """Metrics of every process; `part` is gateway, standby, llm or worker."""

    def __init__(self, registry: CollectorRegistry, part: str) -> None:
        self.build_info = Gauge(
            "tailrace_build_info",
            "1 for each running version of this software",
            ["part", "version", "python"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.started = Gauge(
            "tailrace_process_start_time_seconds",
            "Start time of the newest process of each part (Unix time)",
            ["part"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.build_info.labels(part, metadata.version("tailrace"), platform.python_version()).set(1)
        self.started.labels(part).set(time.time())


class AccessMetrics:
    """Metrics of API keys and their limits."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.keys_state = Gauge(
            "tailrace_keys_file_state",
            "API keys: 0 as in the file; 1 as in the last right file, because the present one is refused; 2 none, the file is gone",
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.rate_counts_away = Gauge(
            "tailrace_rate_counts_away",
            "1 while a gateway counts the calls of each key by itself, because Redis does not answer",
            multiprocess_mode="livemax",
            registry=registry,
        )


class GatewayMetrics:
    """Metrics of the doors and the data plane."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tailrace_requests_total",
            "Recommendation requests by tier, reason and error code",
            ["door", "tier", "reason", "code"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "tailrace_request_seconds",
            "Latency of recommendation requests, arrival to answer",
            ["door", "tier"],
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "tailrace_stage_seconds", "Time in each stage", ["stage"], buckets=STAGE_BUCKETS_S, registry=registry
        )
        self.deadline_missed = Counter(
            "tailrace_deadline_missed_total", "Answers after their deadline", ["door"], registry=registry
        )
        self.feature_age_seconds = Histogram(
            "tailrace_feature_age_seconds",
            "Age of the newest event included in an answer",
            buckets=AGE_BUCKETS_S,
            registry=registry,
        )
        self.events = Counter(
            "tailrace_events_total", "Events by door and outcome", ["door", "code"], registry=registry
        )
        self.answers = Counter(
            "tailrace_answers_total", "Answers by tier and bundle", ["tier", "bundle_version"], registry=registry
        )
        self.attributed_events = Counter(
            "tailrace_attributed_events_total",
            "Events attributed to an answer of this gateway by their request_id, by tier",
            ["tier", "bundle_version"],
            registry=registry,
        )
        self.agreement = Histogram(
            "tailrace_student_agreement_ratio",
            "Share of the LLM's top k that is also in the student's, for requests that both ranked",
            buckets=SHARE_BUCKETS,
            registry=registry,
        )
        self.list_age_seconds = Histogram(
            "tailrace_precomputed_age_seconds",
            "Age of the precomputed lists that requests found, used or not",
            buckets=LIST_AGE_BUCKETS_S,
            registry=registry,
        )
        self.impressions = Counter(
            "tailrace_impressions_total", "Impressions sent, dropped or failed", ["outcome"], registry=registry
        )
        self.explanations = Counter(
            "tailrace_explanations_total", "Explanations of requests, kept or dropped", ["outcome"], registry=registry
        )
        self.breaker_open = Gauge(
            "tailrace_breaker_open",
            "1 while the LLM's circuit breaker is open",
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.refused = Counter(
            "tailrace_refused_total",
            "Recommendations that a gateway refused for overload: by its strain, or expired before they began",
            ["cause"],
            registry=registry,
        )
        self.strain = Gauge(
            "tailrace_admission_strain",
            "Load shedding: 0 none; up to 1 low priority is shed; up to 2 normal too; above 2 low is refused",
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.bundle_info = Gauge(
            "tailrace_bundle_info",
            "1 for the loaded bundle",
            ["version"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.bundle_quality = Gauge(
            "tailrace_bundle_quality",
            "Offline evaluation figures of a loaded bundle",
            ["version", "model", "metric"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.llm_replicas_wanted = Gauge(
            "tailrace_llm_replicas_wanted",
            "Minimum number of LLM replicas",
            multiprocess_mode="livemax",
            registry=registry,
        )


class TextMetrics:
    """Metrics of the text tier; the engine's own have vLLM's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "tailrace_text_requests_total", "Text requests by outcome", ["route", "code"], registry=registry
        )
        self.first_token_seconds = Histogram(
            "tailrace_text_first_token_seconds",
            "Time from arrival at the text tier to the first token",
            ["route"],
            buckets=TEXT_BUCKETS_S,
            registry=registry,
        )
        self.token_gap_seconds = Histogram(
            "tailrace_text_token_gap_seconds",
            "Time between two tokens of a choice",
            ["route"],
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.tokens = Counter(
            "tailrace_text_tokens_total",
            "Tokens: prompt, cached (part of prompt), completion",
            ["kind"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "tailrace_text_in_flight",
            "Choices being generated",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.breaker_open = Gauge(
            "tailrace_text_breaker_open",
            "1 while the text server's circuit breaker is open",
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.rationales = Counter(
            "tailrace_rationales_total",
            "Recommendations that asked for a rationale, by outcome",
            ["outcome"],
            registry=registry,
        )


class EdgeMetrics:
    """Metrics of the edge: the standby's role, whose answers are counted like all others, and what the edge refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.active = Gauge(
            "tailrace_standby_active",
            "1 while the standby answers because Ray Serve cannot",
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.takeovers = Counter("tailrace_standby_takeovers_total", "Takeovers by the standby", registry=registry)
        self.refused = Counter(
            "tailrace_edge_refused_total",
            "Recommendations that the edge refused because too many were in flight",
            registry=registry,
        )


class StreamMetrics:
    """Metrics of the stream worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Gauge(
            "tailrace_stream_lag_events",
            "Events in the log that are not applied yet",
            ["partition"],
            multiprocess_mode="livemostrecent",
            registry=registry,
        )
        self.applied = Counter("tailrace_stream_applied_total", "Events applied to features", registry=registry)
        self.skipped = Counter(
            "tailrace_stream_skipped_total", "Events skipped, by reason", ["reason"], registry=registry
        )
        self.dead_lettered = Counter(
            "tailrace_stream_dead_lettered_total", "Records moved to the dead-letter topic", registry=registry
        )
        self.rerouted = Counter(
            "tailrace_stream_rerouted_total",
            "Records sent on from a wrong partition to their user's",
            registry=registry,
        )
        self.visible_seconds = Histogram(
            "tailrace_event_to_visible_seconds",
            "Time from an event's acceptance until its features are readable",
            buckets=FRESHNESS_BUCKETS_S,
            registry=registry,
        )


class EngineMetrics:
    """Metrics of an engine, under vLLM's names; `model_name` separates ranking from text."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, ["model_name"], multiprocess_mode="livesum", registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry)

        def steps(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name", "kind"], registry=registry)

        def limit(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], multiprocess_mode="livemax", registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = ENGINE_BUCKETS_S) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, ["model_name"], buckets=buckets, registry=registry)

        self.running = gauge("num_requests_running", "Requests in the running batch")
        self.waiting = gauge("num_requests_waiting", "Requests waiting for admission")
        self.kv_cache_usage = Gauge(
            "vllm:kv_cache_usage_perc",
            "Share (0 to 1) of KV blocks held by live requests",
            ["model_name"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.prefix_queries = counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up")
        self.prefix_hits = counter("vllm:prefix_cache_hits_total", "Prompt tokens found cached")
        self.preemptions = counter("vllm:num_preemptions_total", "Preemptions: a request lost its blocks and restarted")
        self.prompt_tokens = counter("vllm:prompt_tokens_total", "Prompt tokens prefilled")
        self.generation_tokens = counter("vllm:generation_tokens_total", "Text tokens generated")
        self.finished = Counter(
            "vllm:request_success_total",
            "Finished requests by reason",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.step_tokens = Histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed in one step, without beam rows",
            ["model_name"],
            buckets=STEP_TOKENS_BUCKETS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "tailrace_engine_batch_size",
            "Requests in one step",
            ["model_name"],
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self.beam_rows = counter("tailrace_engine_beam_rows_total", "Beam rows computed")
        self.late_captures = counter("tailrace_engine_late_captures_total", "Graphs captured after warm-up")
        self.eager_fallbacks = counter("tailrace_engine_eager_fallbacks_total", "Steps run without their graph")
        self.step_seconds = steps("tailrace_engine_step_seconds_total", "Time in steps, by kind of rows")
        self.step_bytes = steps("tailrace_engine_step_bytes_total", "Minimum bytes moved by steps")
        self.step_flops = steps("tailrace_engine_step_flops_total", "Minimum FLOPs computed by steps")
        self.memory_limit = limit(
            "tailrace_engine_memory_limit_bytes_per_second", "Memory bandwidth in bytes per second, measured at start"
        )
        self.compute_limit = limit(
            "tailrace_engine_compute_limit_flops_per_second", "FLOPs per second, measured at start"
        )
        self.cache_config = Gauge(
            "vllm:cache_config_info",
            "1 for the configuration of the KV cache",
            ["model_name", "block_size", "num_gpu_blocks"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.replicas = Gauge(
            "tailrace_llm_replicas",
            "Serving LLM replicas by bundle",
            ["version"],
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.queue_seconds = seconds("request_queue_time", "Time in the queue before the first step")
        self.prefill_seconds = seconds("request_prefill_time", "Time from the first step to the end of prefill")
        self.decode_seconds = seconds("request_decode_time", "Time from the end of prefill to the last step")
        self.inference_seconds = seconds("request_inference_time", "Time from the first step to the last")
        self.e2e_seconds = seconds("e2e_request_latency", "Time from arrival to finish")
        self.first_token_seconds = seconds("time_to_first_token", "Time to the first text token")
        self.inter_token_seconds = seconds("inter_token_latency", "Time between two text tokens", STAGE_BUCKETS_S)


def node_registry(folder: Path) -> CollectorRegistry:
    """Return a registry over the metrics of all processes that share `folder`."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(folder))
    return registry


def render_metrics(folder: Path) -> bytes:
    """Return the metrics of all processes that share `folder`, in Prometheus' text format."""
    return generate_latest(node_registry(folder))


def configure_logging(level: str) -> None:
    """Configure structlog to write JSON lines to stderr."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
