"""Metrics of step costs by kind, and the measured limits of the machine."""

import torch
from prometheus_client import CollectorRegistry

from benchmarks.engine.shapes import random_decoder
from services.llm.engine.config import EngineConfig
from services.llm.engine.cost.machine_limits import MachineLimits, measure_limits
from services.llm.engine.engine import Engine
from services.llm.serving.engine_thread import Stepped
from services.llm.serving.metrics import EngineStepMetrics
from services.observability.metrics import EngineMetrics

LIMITS = MachineLimits(bytes_per_s=1e9, flops_per_s=1e10)


def test_a_step_is_counted_under_its_kind() -> None:
    """Prefill and decode each get their seconds, bytes and FLOPs; the limits stand beside them."""
    registry = CollectorRegistry()
    decoder = random_decoder("tiny", torch.float32, torch.device("cpu"))
    engine = Engine(decoder, EngineConfig(num_blocks=16), items=None, bundle_version="v1")
    report = EngineStepMetrics(EngineMetrics(registry), engine, "m", LIMITS)
    engine.add_text("r", [1, 2, 3], max_new_tokens=3)

    expected: dict[str, list[float]] = {}
    while engine.has_work:
        ended = engine.step(0.0)
        assert all(outcome.request_id == "r" for outcome in ended)
        report.record(Stepped(engine.load(), (), (), began_s=1.0, finished_s=1.25))
        cost = engine.last_cost
        assert cost is not None
        sums = expected.setdefault(cost.kind.value, [0.0, 0.0, 0.0])
        expected[cost.kind.value] = [sums[0] + 0.25, sums[1] + cost.num_bytes, sums[2] + cost.flops]

    assert set(expected) == {"prefill", "decode"}
    for kind, sums in expected.items():
        labels = {"model_name": "m", "kind": kind}
        names = ("seconds", "bytes", "flops")
        found = [registry.get_sample_value(f"tailrace_engine_step_{name}_total", labels) for name in names]
        assert found == sums
    assert registry.get_sample_value("tailrace_engine_memory_limit_bytes_per_second", {"model_name": "m"}) == 1e9


def test_limits_are_measured() -> None:
    """A machine reads and multiplies at some rate."""
    limits = measure_limits(torch.device("cpu"), torch.float32)

    assert limits.bytes_per_s > 1e8
    assert limits.flops_per_s > 1e8
