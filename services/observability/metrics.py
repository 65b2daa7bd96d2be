"""Every metric on one screen.

All processes of a node share a folder (prometheus-client's multi-process mode): each writes its own file there and one
endpoint sums them (`node_metrics`), so that every replica is counted once. The variable that names the folder
(`PROMETHEUS_MULTIPROC_DIR`) must be set before Python starts. Without it (unit tests) the metrics live in the process.
Engine metrics carry vLLM's names, so that its dashboards work unchanged.
"""

import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1, 2, 5)
TEXT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
ENGINE_BUCKETS_S = (*REQUEST_BUCKETS_S, 10, 20, 60)
STAGE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1)
FRESHNESS_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1, 2.5, 5, 10, 60)
AGE_BUCKETS_S = (0.1, 0.25, 1, 5, 30, 60, 300, 3_600, 86_400, 604_800, 2_592_000)
LIST_AGE_BUCKETS_S = (3_600, 21_600, 43_200, 86_400, 172_800, 259_200, 604_800, 1_209_600, 2_592_000)
SHARE_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
LOAD_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


Kind = TypeVar("Kind", bound=Counter | Gauge | Histogram)


class _Declared(Generic[Kind]):
    """A metric that each object of a class below creates for itself, under the attribute's name."""

    def __init__(self, make: Callable[[CollectorRegistry], Kind]) -> None:
        self.make = make

    def __get__(self, _holder: object, _class: type) -> Kind:
        """For the type checker and for class access: an object's own attribute takes precedence."""
        raise AttributeError("metrics belong to an object, not to its class")


class _Metrics:
    """Creates the metrics that its class declares. Label names are separated by spaces."""

    def __init__(self, registry: CollectorRegistry) -> None:
        for name, declared in vars(type(self)).items():
            if isinstance(declared, _Declared):
                setattr(self, name, declared.make(registry))


def _counter(name: str, text: str, labels: str = "") -> _Declared[Counter]:
    return _Declared(lambda registry: Counter(name, text, labels.split(), registry=registry))


def _gauge(name: str, text: str, labels: str = "", of_node: str = "max") -> _Declared[Gauge]:
    """Declare a gauge whose value for the node is the max, sum or mostrecent of its processes' values, or all."""
    mode: Any = f"live{of_node}"
    return _Declared(lambda registry: Gauge(name, text, labels.split(), multiprocess_mode=mode, registry=registry))


def _histogram(name: str, text: str, buckets: Sequence[float], labels: str = "") -> _Declared[Histogram]:
    return _Declared(lambda registry: Histogram(name, text, labels.split(), buckets=buckets, registry=registry))


class ProcessMetrics(_Metrics):
    """Metrics of every process; `part` is gateway, standby, llm, worker or release."""

    build_info = _gauge("tailrace_build_info", "1 for each running version of this software", "part version python")
    started = _gauge(
        "tailrace_process_start_time_seconds", "Start time of the newest process of each part (Unix time)", "part"
    )

    def __init__(self, registry: CollectorRegistry, part: str) -> None:
        super().__init__(registry)
        self.build_info.labels(part, metadata.version("tailrace"), platform.python_version()).set(1)
        self.started.labels(part).set(time.time())


class AccessMetrics(_Metrics):
    """Metrics of API keys and their limits."""

    keys_state = _gauge(
        "tailrace_keys_file_state",
        (
            "API keys: 0 from the file; 1 from its last valid content, because the file is rejected; 2 none, the "
            "file is missing"
        ),
    )
    tenants_state = _gauge(
        "tailrace_tenants_file_state",
        "Tenants: 0 from the file; 1 from its last valid content, because the file is rejected or missing",
    )
    rate_counts_unavailable = _gauge(
        "tailrace_rate_counts_unavailable",
        "1 while a gateway counts each key's calls locally because Redis is unavailable",
    )


class BackgroundMetrics(_Metrics):
    """Metrics of periodic tasks of a gateway or standby, besides its requests."""

    failures = _counter(
        "tailrace_background_failures_total",
        "Unexpected errors of a periodic task, by task; its data stays stale until it succeeds",
        "task",
    )


class ItemsMetrics(_Metrics):
    """Metrics of a process that follows the live catalogue."""

    refused = _counter(
        "tailrace_item_records_refused_total", "Records of the items topic that a process could not read"
    )
    unavailable = _gauge("tailrace_items_unavailable", "1 while a process cannot read the items topic")
    knowledge = _gauge(
        "tailrace_items_knowledge",
        (
            "Item states in a process: 0 topic read to its end once; 1 from the snapshot; 2 none, so it refuses to "
            "recommend"
        ),
    )
    left_out = _counter(
        "tailrace_item_attributes_left_out_total",
        "Attributes that the live catalogue skipped because it holds the maximum number of names",
    )


class GatewayMetrics(_Metrics):
    """Metrics of the doors and the data plane."""

    requests = _counter(
        "tailrace_requests_total", "Recommendation requests by tier, reason and error code", "door tier reason code"
    )
    request_seconds = _histogram(
        "tailrace_request_seconds",
        "Latency of recommendation requests, arrival to answer",
        REQUEST_BUCKETS_S,
        "door tier",
    )
    stage_seconds = _histogram("tailrace_stage_seconds", "Time in each stage", STAGE_BUCKETS_S, "stage")
    deadline_missed = _counter("tailrace_deadline_missed_total", "Answers after their deadline", "door")
    feature_age_seconds = _histogram(
        "tailrace_feature_age_seconds", "Age of the newest event included in an answer", AGE_BUCKETS_S
    )
    events = _counter("tailrace_events_total", "Events by door and outcome", "door code")
    unknown_item_events = _counter(
        "tailrace_unknown_item_events_total", "Accepted events of items that the live catalogue lacks", "door"
    )
    wishes = _counter(
        "tailrace_wishes_total",
        "Wishes by outcome: read, kept (read before), missing (no reader), late, failed, open (breaker)",
        "outcome",
    )
    answers = _counter("tailrace_answers_total", "Answers by tier and bundle", "tier bundle_version")
    surface_answers = _counter(
        "tailrace_surface_answers_total", "Answers to requests that name a surface", "surface tier"
    )
    tenant_requests = _counter(
        "tailrace_tenant_requests_total",
        "Recommendation requests by tenant: full, shed (answered from memory) or an error code. At most 200 tenants",
        "tenant outcome",
    )
    surfaces_state = _gauge(
        "tailrace_surfaces_file_state",
        "Surfaces: 0 from the file; 1 from its last valid content, because the file is rejected or missing",
    )
    experiments_state = _gauge(
        "tailrace_experiments_file_state",
        "Experiments: 0 from the file; 1 from its last valid content, because the file is rejected or missing",
    )
    attributed_events = _counter(
        "tailrace_attributed_events_total",
        "Events attributed to an answer of this gateway by their request_id, by tier",
        "tier bundle_version",
    )
    agreement = _histogram(
        "tailrace_student_agreement_ratio",
        "Fraction of the LLM's ten best items that are in the student's ten, for requests that both ranked",
        SHARE_BUCKETS,
    )
    shadow_samples = _counter(
        "tailrace_shadow_samples_total",
        (
            "Answers sampled for a second ranking, by ranker (candidate, teacher) and outcome: compared, or the "
            "reason not to"
        ),
        "by outcome",
    )
    candidate_agreement = _histogram(
        "tailrace_candidate_agreement_ratio",
        (
            "Rank-biased overlap of an answer with the list of a release's candidate, by the answer's tier and the "
            "candidate"
        ),
        SHARE_BUCKETS,
        "name tier version",
    )
    teacher_agreement = _histogram(
        "tailrace_teacher_agreement_ratio",
        "Rank-biased overlap of another tier's answer with the LLM's list, by that tier and the bundle",
        SHARE_BUCKETS,
        "name tier version",
    )
    list_age_seconds = _histogram(
        "tailrace_precomputed_age_seconds",
        "Age of the precomputed lists that requests read, used or not",
        LIST_AGE_BUCKETS_S,
    )
    impressions = _counter("tailrace_impressions_total", "Impressions sent, dropped or failed", "outcome")
    explanations = _counter("tailrace_explanations_total", "Explanations of requests, kept or dropped", "outcome")
    breaker_open = _gauge("tailrace_breaker_open", "1 while the circuit breaker of a name's LLM is open", "name")
    refused = _counter(
        "tailrace_refused_total",
        "Recommendations that a gateway refused under overload: by its strain, or expired in the queue",
        "cause",
    )
    strain = _gauge(
        "tailrace_admission_strain",
        "Load shedding: 0 none; up to 1 low priority is shed; up to 2 normal too; above 2 low is refused",
    )
    bundle_info = _gauge(
        "tailrace_bundle_info",
        "1 for each bundle that serves, by its name and role: live or canary",
        "version name role",
    )
    bundle_quality = _gauge(
        "tailrace_bundle_quality", "Offline evaluation figures of a loaded bundle", "version model metric"
    )
    bundle_store_lost = _gauge(
        "tailrace_bundle_store_lost", "1 while the bundle store is unavailable; loaded bundles keep serving"
    )
    name_record_corrupt = _gauge(
        "tailrace_name_record_corrupt",
        "1 while the record of a name cannot be decoded and the last valid one serves",
        "name",
    )
    llm_replicas_wanted = _gauge("tailrace_llm_replicas_wanted", "Minimum number of LLM replicas")


class TextMetrics(_Metrics):
    """Metrics of the text tier; the engine's own metrics have vLLM's names."""

    requests = _counter("tailrace_text_requests_total", "Text requests by outcome", "route code")
    first_token_seconds = _histogram(
        "tailrace_text_first_token_seconds",
        "Time from arrival at the text tier to the first token",
        TEXT_BUCKETS_S,
        "route",
    )
    token_gap_seconds = _histogram(
        "tailrace_text_token_gap_seconds", "Time between two tokens of a choice", STAGE_BUCKETS_S, "route"
    )
    schema_violations = _counter(
        "tailrace_text_schema_violations_total", "Finished texts that violate their request's JSON schema"
    )
    tokens = _counter("tailrace_text_tokens_total", "Tokens: prompt, cached (part of prompt), completion", "kind")
    in_flight = _gauge("tailrace_text_in_flight", "Choices being generated", of_node="sum")
    breaker_open = _gauge("tailrace_text_breaker_open", "1 while the text server's circuit breaker is open")
    rationales = _counter(
        "tailrace_rationales_total", "Recommendations that asked for a rationale, by outcome", "outcome"
    )


class EdgeMetrics(_Metrics):
    """Metrics of the edge: the standby's role, and refused requests.

    The standby's answers are counted like all answers.
    """

    active = _gauge("tailrace_standby_active", "1 while the standby answers because Ray Serve cannot")
    takeovers = _counter("tailrace_standby_takeovers_total", "Takeovers by the standby")
    refused = _counter(
        "tailrace_edge_refused_total", "Recommendations that the edge refused because too many were in flight"
    )


class StreamMetrics(_Metrics):
    """Metrics of the stream worker."""

    lag = _gauge(
        "tailrace_stream_lag_events", "Events in the topic that are not applied yet", "partition", of_node="mostrecent"
    )
    applied = _counter("tailrace_stream_applied_total", "Events applied to features")
    skipped = _counter("tailrace_stream_skipped_total", "Events skipped, by reason", "reason")
    progress_time = _gauge(
        "tailrace_stream_progress_time_seconds",
        "When a partition last applied events, or had none left to apply (Unix time)",
        "partition",
        of_node="mostrecent",
    )
    dead_lettered = _counter(
        "tailrace_stream_dead_lettered_total",
        "Records moved to the dead-letter topic; a batch that cannot be decoded counts as one record",
    )
    undecodable = _counter(
        "tailrace_stream_undecodable_batches_total",
        "Batches of records that cannot be decoded, by cause: checksum, codec, format, headers",
        "cause",
    )
    rerouted = _counter(
        "tailrace_stream_rerouted_total", "Records forwarded from a wrong partition to their user's partition"
    )
    impressions_landed = _counter(
        "tailrace_stream_impressions_landed_total", "Impressions in the offline log, and remembered by user"
    )
    changed_logs = _counter(
        "tailrace_stream_changed_logs_total",
        "Times that a partition's log came back shorter or with other records and is read as a new log",
    )
    log_failures = _counter(
        "tailrace_stream_log_failures_total",
        "Failures of the offline log by step: open, append, count (popularity), upkeep, erase",
        "step",
    )
    unreadable_files = _gauge(
        "tailrace_stream_log_unreadable_files", "Files of the offline log that are skipped because they cannot be read"
    )
    visible_seconds = _histogram(
        "tailrace_event_to_visible_seconds",
        "Time from an event's acceptance until its features are readable",
        FRESHNESS_BUCKETS_S,
    )


class ReleaseMetrics(_Metrics):
    """Metrics of the canary analysis process, by name and the candidate's version."""

    share = _gauge(
        "tailrace_release_share", "Fraction of users who get a release's candidate; 0 after its end", "name version"
    )
    guard = _gauge(
        "tailrace_release_guard",
        "Relative loss of the candidate against the live version in a guard, with its interval: worse_by, low, high",
        "name version guard bound",
    )
    verdict = _gauge(
        "tailrace_release_verdict",
        "Result of the last canary analysis: -1 worse, 0 undecided, 1 no worse, 2 better",
        "name version",
    )
    looks = _counter("tailrace_release_looks_total", "Canary analyses of a release's candidate", "name version")
    lost_users = _gauge(
        "tailrace_release_lost_users",
        "1 while a release pauses because users of one version are missing",
        "name version",
    )
    look_time = _gauge(
        "tailrace_release_look_time_seconds", "Time of a name's last canary analysis (Unix time)", "name"
    )
    rolled_back = _counter(
        "tailrace_release_rolled_back_total", "Candidates withdrawn because they were worse", "name version"
    )
    refused = _counter(
        "tailrace_release_refused_records_total", "Records of a topic that a canary analysis could not read", "topic"
    )


class ResidencyMetrics(_Metrics):
    """Metrics of the models in a process's memory; `part` is llm or gateway."""

    resident_bytes = _gauge(
        "tailrace_model_resident_bytes",
        "Bytes of a model that is loading, resident or draining, by part, model name and process",
        "part name",
        of_node="all",
    )
    shared_bytes = _gauge(
        "tailrace_model_shared_bytes",
        "Bytes that several models share, such as the decoder of their adapters, by part and process",
        "part",
        of_node="all",
    )
    load_failed = _gauge("tailrace_model_load_failed", "1 while a model cannot be loaded, by model name", "part name")
    loads = _counter("tailrace_model_loads_total", "Loads of a model into memory, by model name", "part name")
    load_seconds = _histogram(
        "tailrace_model_load_seconds", "Time to load a model whose files are on this machine", LOAD_BUCKETS_S
    )
    evictions = _counter(
        "tailrace_model_evictions_total", "Models unloaded, by model name and reason: room or idle", "part name reason"
    )

    def __init__(self, registry: CollectorRegistry, part: str) -> None:
        super().__init__(registry)
        self.part = part


class EngineMetrics(_Metrics):
    """Metrics of an engine, under vLLM's names; `model_name` separates ranking from text."""

    running = _gauge("vllm:num_requests_running", "Requests in the running batch", "model_name", of_node="sum")
    waiting = _gauge("vllm:num_requests_waiting", "Requests waiting for admission", "model_name", of_node="sum")
    kv_cache_usage = _gauge(
        "vllm:kv_cache_usage_perc", "Fraction (0 to 1) of KV blocks held by live requests", "model_name"
    )
    prefix_queries = _counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up", "model_name")
    prefix_hits = _counter("vllm:prefix_cache_hits_total", "Prompt tokens found cached", "model_name")
    preemptions = _counter(
        "vllm:num_preemptions_total", "Preemptions: a request lost its blocks and restarted", "model_name"
    )
    prompt_tokens = _counter("vllm:prompt_tokens_total", "Prompt tokens prefilled", "model_name")
    generation_tokens = _counter("vllm:generation_tokens_total", "Text tokens generated", "model_name")
    draft_tokens = _counter("vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified", "model_name")
    accepted_tokens = _counter("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens accepted", "model_name")
    finished = _counter("vllm:request_success_total", "Finished requests by reason", "model_name finished_reason")
    step_tokens = _histogram(
        "vllm:iteration_tokens_total",
        "Tokens computed in one step, without beam rows",
        STEP_TOKENS_BUCKETS,
        "model_name",
    )
    batch_size = _histogram("tailrace_engine_batch_size", "Requests in one step", BATCH_BUCKETS, "model_name")
    beam_rows = _counter("tailrace_engine_beam_rows_total", "Beam rows computed", "model_name")
    late_captures = _counter("tailrace_engine_late_captures_total", "Graphs captured after warm-up", "model_name")
    eager_fallbacks = _counter("tailrace_engine_eager_fallbacks_total", "Steps run without their graph", "model_name")
    step_seconds = _counter("tailrace_engine_step_seconds_total", "Time in steps, by kind of rows", "model_name kind")
    step_bytes = _counter("tailrace_engine_step_bytes_total", "Minimum bytes moved by steps", "model_name kind")
    step_flops = _counter("tailrace_engine_step_flops_total", "Minimum FLOPs computed by steps", "model_name kind")
    memory_limit = _gauge(
        "tailrace_engine_memory_limit_bytes_per_second",
        "Memory bandwidth in bytes per second, measured at start",
        "model_name",
    )
    compute_limit = _gauge(
        "tailrace_engine_compute_limit_flops_per_second", "FLOPs per second, measured at start", "model_name"
    )
    cache_config = _gauge(
        "vllm:cache_config_info", "1 for the configuration of the KV cache", "model_name block_size num_gpu_blocks"
    )
    replicas = _gauge(
        "tailrace_llm_replicas",
        "Serving LLM replicas by bundle, name and role: live or canary",
        "version name role",
        of_node="sum",
    )
    queue_seconds = _histogram(
        "vllm:request_queue_time_seconds", "Time in the queue before the first step", ENGINE_BUCKETS_S, "model_name"
    )
    prefill_seconds = _histogram(
        "vllm:request_prefill_time_seconds",
        "Time from the first step to the end of prefill",
        ENGINE_BUCKETS_S,
        "model_name",
    )
    decode_seconds = _histogram(
        "vllm:request_decode_time_seconds",
        "Time from the end of prefill to the last step",
        ENGINE_BUCKETS_S,
        "model_name",
    )
    inference_seconds = _histogram(
        "vllm:request_inference_time_seconds", "Time from the first step to the last", ENGINE_BUCKETS_S, "model_name"
    )
    e2e_seconds = _histogram(
        "vllm:e2e_request_latency_seconds", "Time from arrival to finish", ENGINE_BUCKETS_S, "model_name"
    )
    first_token_seconds = _histogram(
        "vllm:time_to_first_token_seconds", "Time to the first text token", ENGINE_BUCKETS_S, "model_name"
    )
    inter_token_seconds = _histogram(
        "vllm:inter_token_latency_seconds", "Time between two text tokens", STAGE_BUCKETS_S, "model_name"
    )
