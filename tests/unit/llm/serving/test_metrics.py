"""What the metrics say of an engine's steps: vLLM's names, by model, and zeros where nothing happened."""

from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.machine_limits import MachineLimits
from services.llm.engine.engine import Engine
from services.llm.ranking.model import load_bundle
from services.llm.serving.engine_thread import Stepped
from services.llm.serving.metrics import EngineStepMetrics
from services.llm.serving.streams import Ended
from services.observability.metrics import EngineMetrics
from tests.support.bundles import publish_bundle

STEP_S = 0.25


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """A tiny engine with blocks of four tokens."""
    config = EngineConfig(block_tokens=4, num_blocks=64, tile_tokens=64)
    return load_bundle(publish_bundle(tmp_path / "bundles", "v1"), config, torch.float32, "cpu").engine


def run(engine: Engine, registry: CollectorRegistry) -> None:
    """Step to the end, each step taking a quarter of a second."""
    report = EngineStepMetrics(
        EngineMetrics(registry), engine, "tiny", MachineLimits(bytes_per_s=1e9, flops_per_s=1e12)
    )
    now_s = 0.0
    while engine.has_work:
        outcomes = engine.step(now_s)
        began_s, now_s = now_s, now_s + STEP_S
        load = engine.load()
        ended = [Ended(outcome, now_s, load) for outcome in outcomes]
        report.record(Stepped(load=load, new_tokens=engine.new_tokens, ended=ended, began_s=began_s, finished_s=now_s))


def test_texts_and_rankings_are_counted(engine) -> None:
    """Tokens, their gaps, the parts of a request's time and how it ended are told; what never happened is 0."""
    registry = CollectorRegistry()
    engine.add_text("text", list(range(9)), max_new_tokens=5)
    engine.add_rank("rank", list(range(9)), k=3, allowed=np.ones(30, dtype=bool))

    run(engine, registry)

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
