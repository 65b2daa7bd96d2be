"""Which process holds which model, and why others were unloaded, from metrics."""

from dataclasses import astuple

from prometheus_client import CollectorRegistry

from services.observability.metrics import ResidencyMetrics
from services.residency.report import resident_models


def test_a_row_says_who_holds_a_model_and_why_it_was_unloaded() -> None:
    """Models without memory are listed only if they cannot be loaded, and shared memory on its own."""
    registry = CollectorRegistry()
    llm = ResidencyMetrics(registry, "llm")
    llm.resident_bytes.labels("llm", "mail").set(300)
    llm.resident_bytes.labels("gateway", "mail").set(100)
    llm.resident_bytes.labels("llm", "news").set(0)
    llm.shared_bytes.labels("llm").set(700)
    llm.resident_bytes.labels("llm", "home").set(0)
    llm.load_failed.labels("llm", "home").set(1)
    llm.loads.labels("llm", "mail").inc(2)
    llm.evictions.labels("llm", "mail", "room").inc()

    assert [astuple(model) for model in resident_models(registry.collect())] == [
        ("gateway", "", "mail", 100, 0, 0, 0, False),
        ("llm", "", "(shared)", 700, 0, 0, 0, False),
        ("llm", "", "home", 0, 0, 0, 0, True),
        ("llm", "", "mail", 300, 2, 1, 0, False),
    ]


def test_models_of_a_process_without_a_memory_limit_are_listed() -> None:
    """Their bytes are not counted, and no model is unloaded."""
    registry = CollectorRegistry()
    gateway = ResidencyMetrics(registry, "gateway")
    gateway.resident_bytes.labels("gateway", "mail").set(0)
    gateway.resident_bytes.labels("gateway", "news").set(0)
    gateway.loads.labels("gateway", "mail").inc()

    assert [astuple(model) for model in resident_models(registry.collect())] == [
        ("gateway", "", "mail", None, 1, 0, 0, False)
    ]
