"""The series of a PromQL expression and the series that this project exports: no query may name an absent series."""

import json
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.utils import floatToGoString

from services.observability.metrics import (
    AccessMetrics,
    BackgroundMetrics,
    EdgeMetrics,
    EngineMetrics,
    GatewayMetrics,
    ItemsMetrics,
    ProcessMetrics,
    ReleaseMetrics,
    ResidencyMetrics,
    StreamMetrics,
    TextMetrics,
)
from tests.support.pages import ROOT

RULES = ROOT / "infra/prometheus/rules"
DASHBOARDS = ROOT / "infra/grafana/dashboards"
PROMETHEUS_OWN = {
    "up": {"job", "instance", "namespace"},
    "scrape_samples_scraped": {"job", "instance", "namespace"},
    "ALERTS": {"alertname", "alertstate", "severity", "slo", "window", "namespace"},
}
SCRAPED = {"job", "instance", "namespace"}
"""Labels that Prometheus, or its operator, adds to every series."""
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported() -> dict[str, set[str]]:
    """Return every series name that our processes may export, with its labels."""
    registry = CollectorRegistry()
    holders = (
        AccessMetrics(registry),
        GatewayMetrics(registry),
        TextMetrics(registry),
        StreamMetrics(registry),
        EdgeMetrics(registry),
        EngineMetrics(registry),
        ReleaseMetrics(registry),
        ResidencyMetrics(registry, "llm"),
        ProcessMetrics(registry, "gateway"),
        BackgroundMetrics(registry),
        ItemsMetrics(registry),
    )
    labels: dict[str, set[str]] = {}
    for metric in (
        value for holder in holders for value in vars(holder).values() if isinstance(value, MetricWrapperBase)
    ):
        for suffix in _SUFFIXES[metric._type]:
            extra = {"le"} if suffix == "_bucket" else set()
            labels[metric._name + suffix] = set(metric._labelnames) | extra | SCRAPED
    return labels


def bucket_borders() -> dict[str, set[str]]:
    """Return the `le` values of every histogram by its bucket series' name, as prometheus-client writes them."""
    registry = CollectorRegistry()
    borders: dict[str, set[str]] = {}
    for holder in (GatewayMetrics(registry), StreamMetrics(registry), EngineMetrics(registry)):
        for metric in vars(holder).values():
            if metric._type == "histogram":
                borders[f"{metric._name}_bucket"] = {floatToGoString(border) for border in metric._upper_bounds}
    return borders


def recorded() -> dict[str, set[str]]:
    """Return the series that our rules record, with their labels."""
    return {rule["record"]: {*rule.get("labels", {}), "namespace"} for rule in all_rules() if "record" in rule}


def all_rules() -> list[dict[str, Any]]:
    """Return every rule of every rule file."""
    files = [yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yaml"))]
    return [rule for content in files for group in content["groups"] for rule in group["rules"]]


def all_targets() -> list[tuple[str, str, str]]:
    """Return the board, the panel's title and the expression of every query of every dashboard."""
    targets = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            targets += [(path.stem, panel["title"], target["expr"]) for target in panel.get("targets", [])]
    return targets


def filled_in(expr: str, interval: str = "1m") -> str:
    """Replace Grafana's own variables."""
    return expr.replace("$__rate_interval", interval).replace("$namespace", ".*")


def selectors(expr: str) -> list[tuple[str, dict[str, str]]]:
    """Return every series name of an expression with the labels and values that it selects."""
    return [
        (node.name, {matcher.name: matcher.value for matcher in node.matchers.matchers})
        for node in _nodes(promql_parser.parse(filled_in(expr)))
        if isinstance(node, promql_parser.VectorSelector)
    ]


def grouped_by(expr: str) -> list[tuple[set[str], list[str]]]:
    """Return the labels of every `by (...)` of an expression, with the series inside it."""
    return [
        (set(node.modifier.labels), [name for name, _ in selectors(node.expr.prettify())])
        for node in _nodes(promql_parser.parse(filled_in(expr)))
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
    ]


def mixes_environments(expr: str) -> list[str]:
    """Return the aggregations of an expression that add up series of several environments."""
    return [
        node.prettify()
        for node in _nodes(promql_parser.parse(filled_in(expr)))
        if isinstance(node, promql_parser.AggregateExpr)
        and "namespace" not in (node.modifier.labels if node.modifier is not None else ())
    ]


def complaints(expr: str, known: dict[str, set[str]]) -> list[str]:
    """Return the names and labels of an expression that are not exported."""
    errors = []
    for name, asked in selectors(expr):
        if name not in known:
            errors.append(f"nobody exports {name}")
        else:
            errors += [f"{name} has no label {label}" for label in asked.keys() - known[name]]
    for labels, names in grouped_by(expr):
        there = set().union(*(known.get(name, set()) for name in names))
        errors += [f"nothing below `by ({label})` has it" for label in labels - there]
    return errors


def _nodes(expr: Any) -> Iterator[Any]:
    seen: list[Any] = []

    def visit(node: Any) -> bool:
        seen.append(node)
        return True

    promql_parser.walk(expr, visit)
    return iter(seen)
