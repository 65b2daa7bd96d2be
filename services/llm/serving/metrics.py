"""Records the engine's metrics after each step, and the spans of a request after its end: queue, prefill and decode.

`EngineStepMetrics` runs in the engine's thread, so it only counts and observes. The engine itself does no tracing:
spans are created afterwards from the times in the outcome.
"""

from collections.abc import Sequence

from services.contracts.engine_load import EngineLoad
from services.llm.engine.cost.cost_model import StepKind
from services.llm.engine.cost.machine_limits import MachineLimits
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import NewToken
from services.llm.serving.engine_thread import Stepped
from services.llm.serving.streams import FinishedRequest
from services.observability.metrics import EngineMetrics
from services.observability.tracing import note, past_span


class EngineStepMetrics:
    """Records the metrics of one engine under the name of its model."""

    def __init__(self, metrics: EngineMetrics, engine: Engine, model_name: str, limits: MachineLimits) -> None:
        self._metrics = metrics
        self._engine = engine
        self._name = model_name
        self._last_token_s: dict[str, float] = {}
        self._num_late = self._num_eager = self._num_drafted = self._num_accepted = 0
        self._num_running = self._num_waiting = 0
        for counter in (metrics.prefix_queries, metrics.prefix_hits, metrics.preemptions, metrics.prompt_tokens):
            counter.labels(model_name)
        for counter in (metrics.generation_tokens, metrics.beam_rows, metrics.late_captures, metrics.eager_fallbacks):
            counter.labels(model_name)
        for counter in (metrics.draft_tokens, metrics.accepted_tokens):
            counter.labels(model_name)
        for kind in StepKind:
            metrics.step_seconds.labels(model_name, kind.value)
        size = engine.kv_size
        metrics.cache_config.labels(model_name, str(size.block_tokens), str(size.num_blocks)).set(1)
        metrics.memory_limit.labels(model_name).set(limits.bytes_per_s)
        metrics.compute_limit.labels(model_name).set(limits.flops_per_s)

    def record(self, stepped: Stepped) -> None:
        """Record a step, its tokens and the requests that ended in it."""
        metrics, name, size = self._metrics, self._name, self._engine.last_step
        if size.num_requests:
            metrics.step_tokens.labels(name).observe(size.num_batched_tokens)
            metrics.batch_size.labels(name).observe(size.num_requests)
            metrics.beam_rows.labels(name).inc(size.num_beam_rows)
            self._record_cost(stepped.finished_s - stepped.began_s)
        self._record_graphs()
        self._record_drafts()
        self._record_queues(stepped.load)
        metrics.kv_cache_usage.labels(name).set(stepped.load.kv_cache_usage)
        if stepped.new_tokens:
            metrics.generation_tokens.labels(name).inc(len(stepped.new_tokens))
            self._record_token_times(stepped.new_tokens, stepped.finished_s)
        for end in stepped.ended:
            self._record_end(end)

    def _record_cost(self, seconds: float) -> None:
        cost = self._engine.last_cost
        if cost is not None:
            labels = (self._name, cost.kind.value)
            self._metrics.step_seconds.labels(*labels).inc(seconds)
            self._metrics.step_bytes.labels(*labels).inc(cost.num_bytes)
            self._metrics.step_flops.labels(*labels).inc(cost.flops)

    def _record_queues(self, load: EngineLoad) -> None:
        """Add the change of this engine's queues to the gauges, which a canary's and the live engine may share."""
        self._metrics.running.labels(self._name).inc(load.num_running - self._num_running)
        self._metrics.waiting.labels(self._name).inc(load.num_waiting - self._num_waiting)
        self._num_running, self._num_waiting = load.num_running, load.num_waiting

    def _record_graphs(self) -> None:
        counts = self._engine.graph_counts
        self._metrics.late_captures.labels(self._name).inc(counts.late_captures - self._num_late)
        self._metrics.eager_fallbacks.labels(self._name).inc(counts.eager_fallbacks - self._num_eager)
        self._num_late, self._num_eager = counts.late_captures, counts.eager_fallbacks

    def _record_drafts(self) -> None:
        counts = self._engine.draft_counts
        self._metrics.draft_tokens.labels(self._name).inc(counts.num_drafted - self._num_drafted)
        self._metrics.accepted_tokens.labels(self._name).inc(counts.num_accepted - self._num_accepted)
        self._num_drafted, self._num_accepted = counts.num_drafted, counts.num_accepted

    def _record_token_times(self, new_tokens: Sequence[NewToken], now_s: float) -> None:
        gap_seconds = self._metrics.inter_token_seconds.labels(self._name)
        for token in new_tokens:
            before_s = self._last_token_s.get(token.request_id)
            if before_s is None:
                self._metrics.first_token_seconds.labels(self._name).observe(now_s - token.arrival_s)
            else:
                gap_seconds.observe(now_s - before_s)
            self._last_token_s[token.request_id] = now_s

    def _record_end(self, end: FinishedRequest) -> None:
        metrics, name, outcome = self._metrics, self._name, end.outcome
        self._last_token_s.pop(outcome.request_id, None)
        metrics.finished.labels(name, outcome.status.value).inc()
        metrics.e2e_seconds.labels(name).observe(end.finished_s - outcome.arrival_s)
        if outcome.started_s is None:
            return
        metrics.prefix_queries.labels(name).inc(outcome.num_prompt_tokens)
        metrics.prefix_hits.labels(name).inc(outcome.num_cached_tokens)
        metrics.preemptions.labels(name).inc(outcome.num_preemptions)
        metrics.prompt_tokens.labels(name).inc(outcome.num_prompt_tokens - outcome.num_cached_tokens)
        metrics.queue_seconds.labels(name).observe(end.started_s - outcome.arrival_s)
        metrics.inference_seconds.labels(name).observe(end.finished_s - end.started_s)
        metrics.prefill_seconds.labels(name).observe(end.decoding_s - end.started_s)
        metrics.decode_seconds.labels(name).observe(end.finished_s - end.decoding_s)


def record_spans(ended: FinishedRequest) -> None:
    """Add the spans of an ended request below the open span, and its counts to that span. No effect without tracing."""
    outcome = ended.outcome
    note(
        {
            "gen_ai.usage.input_tokens": outcome.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.num_cached_tokens,
            "tailrace.engine.steps": outcome.num_steps,
            "tailrace.engine.finish_reason": outcome.status.value,
        }
    )
    past_span("queue", outcome.arrival_s, ended.started_s)
    if outcome.started_s is not None:
        num_computed = outcome.num_prompt_tokens - outcome.num_cached_tokens
        past_span("prefill", ended.started_s, ended.decoding_s, {"tailrace.engine.computed_tokens": num_computed})
    if outcome.decoding_s is not None:
        past_span("decode", ended.decoding_s, ended.finished_s)
