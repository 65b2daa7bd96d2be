"""Turns what each step brought into the engine's metrics. Runs in the engine's thread, so it observes and computes nothing else."""

from collections.abc import Sequence

from services.llm.engine.cost.step_cost import Limits, StepKind
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import Grown
from services.llm.serving.engine_thread import Stepped
from services.llm.serving.stream import Ended
from services.observability.metrics import EngineMetrics


class EngineReport:
    """The metrics of one engine, which callers know by the name of its model."""

    def __init__(self, metrics: EngineMetrics, engine: Engine, model_name: str, limits: Limits) -> None:
        self._metrics = metrics
        self._engine = engine
        self._name = model_name
        self._last_token_s: dict[str, float] = {}
        self._num_late = self._num_eager = 0
        for counter in (metrics.prefix_queries, metrics.prefix_hits, metrics.preemptions, metrics.prompt_tokens):
            counter.labels(model_name)
        for counter in (metrics.generation_tokens, metrics.beam_rows, metrics.late_captures, metrics.eager_fallbacks):
            counter.labels(model_name)
        for kind in StepKind:
            metrics.step_seconds.labels(model_name, kind.value)
        metrics.memory_limit.labels(model_name).set(limits.bytes_per_s)
        metrics.compute_limit.labels(model_name).set(limits.flops_per_s)

    def step(self, stepped: Stepped) -> None:
        """Count a step, its tokens and what ended in it."""
        metrics, name, size = self._metrics, self._name, self._engine.last_step
        if size.num_requests:
            metrics.step_tokens.labels(name).observe(size.num_tokens)
            metrics.batch_size.labels(name).observe(size.num_requests)
            metrics.beam_rows.labels(name).inc(size.num_beam_rows)
            self._cost(stepped.finished_s - stepped.began_s)
        self._graphs()
        metrics.running.labels(name).set(stepped.load.num_running)
        metrics.waiting.labels(name).set(stepped.load.num_waiting)
        metrics.kv_cache_usage.labels(name).set(stepped.load.kv_cache_usage)
        if stepped.grown:
            metrics.generation_tokens.labels(name).inc(len(stepped.grown))
            self._gaps(stepped.grown, stepped.finished_s)
        for end in stepped.ended:
            self._end(end)

    def _cost(self, seconds: float) -> None:
        cost = self._engine.last_cost
        if cost is not None:
            labels = (self._name, cost.kind.value)
            self._metrics.step_seconds.labels(*labels).inc(seconds)
            self._metrics.step_bytes.labels(*labels).inc(cost.num_bytes)
            self._metrics.step_flops.labels(*labels).inc(cost.flops)

    def _graphs(self) -> None:
        counts = self._engine.graph_counts
        self._metrics.late_captures.labels(self._name).inc(counts.late_captures - self._num_late)
        self._metrics.eager_fallbacks.labels(self._name).inc(counts.eager_fallbacks - self._num_eager)
        self._num_late, self._num_eager = counts.late_captures, counts.eager_fallbacks

    def _gaps(self, grown: Sequence[Grown], now_s: float) -> None:
        gap_seconds = self._metrics.inter_token_seconds.labels(self._name)
        for one in grown:
            before_s = self._last_token_s.get(one.request_id)
            if before_s is None:
                self._metrics.first_token_seconds.labels(self._name).observe(now_s - one.arrival_s)
            else:
                gap_seconds.observe(now_s - before_s)
            self._last_token_s[one.request_id] = now_s

    def _end(self, end: Ended) -> None:
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
