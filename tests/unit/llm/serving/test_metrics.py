"""Metrics of engine steps: vLLM's names by model, costs by kind, zeros for absent events; and request spans."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from services.contracts.engine_load import EngineLoad
from services.llm.engine.cost.machine_limits import MachineLimits, measure_limits
from services.llm.engine.outcome import EngineOutcome, SequenceStatus
from services.llm.serving.engine_thread import Stepped
from services.llm.serving.metrics import EngineStepMetrics, record_spans
from services.llm.serving.streams import FinishedRequest
from services.observability.metrics import EngineMetrics
from tests.support.engine.engines import build_decoder, build_engine, build_items
from tests.support.spans import Recorder

STEP_S = 0.25
LIMITS = MachineLimits(bytes_per_s=1e9, flops_per_s=1e12)


def test_texts_and_rankings_are_counted() -> None:
    """Tokens, latencies, request outcomes and step costs are counted, and all other counters are 0."""
    items, registry = build_items(1), CollectorRegistry()
    engine = build_engine(build_decoder(items), items)
    metrics = EngineStepMetrics(EngineMetrics(registry), engine, "tiny", LIMITS)
    engine.add_text("text", list(range(9)), max_new_tokens=5)
    engine.add_rank("rank", list(range(9)), k=3)

    costs: dict[str, list[float]] = {}
    now_s = 0.0
    while engine.has_work:
        outcomes = engine.step(now_s)
        began_s, now_s = now_s, now_s + STEP_S
        load, cost = engine.load(), engine.last_cost
        ended = [FinishedRequest(outcome, now_s, load) for outcome in outcomes]
        metrics.record(Stepped(load=load, new_tokens=engine.new_tokens, ended=ended, began_s=began_s, finished_s=now_s))
        assert cost is not None
        sums = costs.setdefault(cost.kind.value, [0.0, 0.0, 0.0])
        costs[cost.kind.value] = [sums[0] + STEP_S, sums[1] + cost.num_bytes, sums[2] + cost.flops]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "tiny", **labels})

    assert value("vllm:generation_tokens_total") == 5
    assert value("vllm:time_to_first_token_seconds_sum") == STEP_S
    assert value("vllm:inter_token_latency_seconds_count") == 4
    assert value("vllm:inter_token_latency_seconds_sum") == 4 * STEP_S
    assert value("vllm:request_success_total", finished_reason="length") == 1
    assert value("vllm:request_success_total", finished_reason="stop") == 1
    assert value("vllm:request_prefill_time_seconds_sum") == 2 * STEP_S
    assert value("vllm:request_decode_time_seconds_sum") == 4 * STEP_S
    assert value("vllm:e2e_request_latency_seconds_sum") == 6 * STEP_S
    assert value("vllm:prefix_cache_queries_total") == 18
    assert value("vllm:num_requests_running") == 0
    for never in ("vllm:num_preemptions", "tailrace_engine_late_captures", "tailrace_engine_eager_fallbacks"):
        assert value(f"{never}_total") == 0
    assert set(costs) == {"prefill", "decode"}
    for kind, sums in costs.items():
        names = ("seconds", "bytes", "flops")
        assert [value(f"tailrace_engine_step_{name}_total", kind=kind) for name in names] == pytest.approx(sums)
    assert value("tailrace_engine_memory_limit_bytes_per_second") == LIMITS.bytes_per_s


def test_two_engines_of_a_replica_add_up() -> None:
    """During a release, the gauges add the live and the candidate engine, and return to 0 when both are idle."""
    items, registry = build_items(1), CollectorRegistry()
    shared = EngineMetrics(registry)
    engines = [build_engine(build_decoder(items), items) for _ in range(2)]
    reports = [EngineStepMetrics(shared, engine, "tiny", LIMITS) for engine in engines]
    for engine, number in zip(engines, (1, 3), strict=True):
        for index in range(number):
            engine.add_text(f"text {index}", list(range(9)), max_new_tokens=4)

    def running() -> float | None:
        return registry.get_sample_value("vllm:num_requests_running", {"model_name": "tiny"})

    seen = []
    while any(engine.has_work for engine in engines):
        for engine, report in zip(engines, reports, strict=True):
            engine.step(0.0)
            report.record(Stepped(load=engine.load(), new_tokens=[], ended=[], began_s=0.0, finished_s=STEP_S))
        seen.append((running(), sum(engine.load().num_running for engine in engines)))

    assert all(gauge == loads for gauge, loads in seen)
    assert (max(loads for _, loads in seen), seen[-1][0]) == (4, 0)


def test_limits_are_measured() -> None:
    """Measured memory bandwidth and FLOP rate are positive."""
    limits = measure_limits(torch.device("cpu"), torch.float32)

    assert min(limits.bytes_per_s, limits.flops_per_s) > 1e8


def ended(**changes: Any) -> FinishedRequest:
    """Build a request that waited 1 s, prefilled 2 s and decoded 3 s."""
    now_s = time.monotonic()
    fields: dict[str, Any] = {
        "request_id": "r",
        "status": SequenceStatus.DONE,
        "item_indices": np.zeros(0, dtype=np.int64),
        "scores": np.zeros(0, dtype=np.float32),
        "tokens": (),
        "num_prompt_tokens": 100,
        "num_cached_tokens": 64,
        "arrival_s": now_s - 6.0,
        "started_s": now_s - 5.0,
        "decoding_s": now_s - 3.0,
        "num_steps": 3,
    }
    return FinishedRequest(
        EngineOutcome(**{**fields, **changes}), now_s, EngineLoad(num_running=0, num_waiting=0, kv_cache_usage=0.0)
    )


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, {"queue": 1.0, "prefill": 2.0, "decode": 3.0}),
        ({"decoding_s": None}, {"queue": 1.0, "prefill": 5.0}),
        ({"started_s": None, "decoding_s": None, "status": SequenceStatus.LATE}, {"queue": 6.0}),
    ],
)
def test_each_part_is_a_span_of_its_length(changes: dict[str, Any], lengths: dict[str, float]) -> None:
    """A request that never ran has only a queue span; a request that ended with its prompt has no decode span."""
    recorder = Recorder()

    with recorder.tracing.entry("llm.rank", {}):
        record_spans(ended(**changes))

    durations_s = {span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in recorder.spans}
    del durations_s["llm.rank"]
    assert durations_s == pytest.approx(lengths, abs=1e-3)
    assert recorder.tree() == {**dict.fromkeys(lengths, "llm.rank"), "llm.rank": None}
