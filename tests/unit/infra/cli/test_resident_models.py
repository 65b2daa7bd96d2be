"""`tailrace bundles list --resident`: which process holds which model, and why others were unloaded."""

from prometheus_client import CollectorRegistry

from infra.cli.bundles import resident_rows
from services.observability.metrics import ResidencyMetrics


def test_a_row_says_who_holds_a_model_and_why_it_was_unloaded() -> None:
    """Models without memory are listed only if they cannot be loaded."""
    registry = CollectorRegistry()
    llm = ResidencyMetrics(registry, "llm")
    llm.resident_bytes.labels("llm", "mail").set(3 * 2**20)
    llm.resident_bytes.labels("gateway", "mail").set(2**20)
    llm.resident_bytes.labels("llm", "news").set(0)
    llm.resident_bytes.labels("llm", "home").set(0)
    llm.load_failed.labels("llm", "home").set(1)
    llm.loads.labels("llm", "mail").inc(2)
    llm.evictions.labels("llm", "mail", "room").inc()

    assert resident_rows(registry.collect()) == [
        ("gateway", "", "mail", "1.0", "0", "0", "0", ""),
        ("llm", "", "home", "0.0", "0", "0", "0", "cannot be loaded"),
        ("llm", "", "mail", "3.0", "2", "1", "0", ""),
    ]


def test_models_of_a_process_without_a_memory_limit_are_listed() -> None:
    """Their bytes are not counted, and none is unloaded."""
    registry = CollectorRegistry()
    gateway = ResidencyMetrics(registry, "gateway")
    gateway.resident_bytes.labels("gateway", "mail").set(0)
    gateway.resident_bytes.labels("gateway", "news").set(0)
    gateway.loads.labels("gateway", "mail").inc()

    assert resident_rows(registry.collect()) == [("gateway", "", "mail", "-", "1", "0", "0", "")]
