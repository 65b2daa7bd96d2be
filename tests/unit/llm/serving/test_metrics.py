"""Metrics of an engine's steps: vLLM's names by model, costs by kind, and zeros for what has not happened."""

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.machine_limits import MachineLimits, measure_limits
from services.llm.engine.engine import Engine
from services.llm.serving.engine_thread import Stepped
from services.llm.serving.metrics import EngineStepMetrics
from services.llm.serving.streams import Ended
from services.observability.metrics import EngineMetrics
from tests.support.bundles import build_catalogue, build_decoder

STEP_S = 0.25
LIMITS = MachineLimits(bytes_per_s=1e9, flops_per_s=1e12)


def test_texts_and_rankings_are_counted() -> None:
    """Tokens, their gaps, the parts of a request's time, how it ended and the costs of each kind of step; the rest is 0."""
    catalogue, registry = build_catalogue(), CollectorRegistry()
    config = EngineConfig(block_tokens=4, num_blocks=64, tile_tokens=64, cpu_kernels="torch")
    items = ItemCodes(codes=catalogue.codes, level_sizes=catalogue.level_sizes, token_offsets=catalogue.token_offsets)
    engine = Engine(build_decoder(catalogue.vocab_size, seed=0), config, items=items, bundle_version="v1")
    metrics = EngineStepMetrics(EngineMetrics(registry), engine, "tiny", LIMITS)
    engine.add_text("text", list(range(9)), max_new_tokens=5)
    engine.add_rank("rank", list(range(9)), k=3, allowed=np.ones(30, dtype=bool))

    costs: dict[str, list[float]] = {}
    now_s = 0.0
    while engine.has_work:
        outcomes = engine.step(now_s)
        began_s, now_s = now_s, now_s + STEP_S
        load, cost = engine.load(), engine.last_cost
        ended = [Ended(outcome, now_s, load) for outcome in outcomes]
        metrics.record(Stepped(load=load, new_tokens=engine.new_tokens, ended=ended, began_s=began_s, finished_s=now_s))
        assert cost is not None
        sums = costs.setdefault(cost.kind.value, [0.0, 0.0, 0.0])
        costs[cost.kind.value] = [sums[0] + STEP_S, sums[1] + cost.num_bytes, sums[2] + cost.flops]

    def value(name: str, **labels: str) -> float | None:
        """Return a sample of this model."""
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


def test_limits_are_measured() -> None:
    """A machine reads and multiplies at some rate."""
    limits = measure_limits(torch.device("cpu"), torch.float32)

    assert limits.bytes_per_s > 1e8
    assert limits.flops_per_s > 1e8
