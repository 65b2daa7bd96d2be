"""The live bundle's quality table, from its evaluation report: every model under one protocol. Pure.

Knows the report's shape and no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODELS = ("decoder", "student", "twin", "item_knn", "bigram", "popularity")
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model: hit rate and NDCG at ten, seen items removed; the interval is NDCG's 95 % bootstrap."""

    model: str
    hr_at_10: float
    ndcg_at_10: float
    ndcg_interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What a bundle's report says."""

    dataset: str
    protocol: str
    num_test_users: int
    student_share: float | None
    rows: tuple[Row, ...]


def quality_of(report: Mapping[str, Any]) -> Quality:
    """Read a report; what it lacks is left out."""
    metrics = report.get("metrics", {})
    return Quality(
        dataset=str(report.get("dataset", "")),
        protocol=str(report.get("protocol", "")),
        num_test_users=int(report.get("num_test_users", 0)),
        student_share=report.get("student_share"),
        rows=tuple(_row(model, metrics[model]) for model in MODELS if model in metrics),
    )


def _row(model: str, metrics: Mapping[str, Any]) -> Row:
    interval = metrics.get("ndcg@10_interval")
    return Row(
        model=model,
        hr_at_10=float(metrics["hr@10"]),
        ndcg_at_10=float(metrics["ndcg@10"]),
        ndcg_interval=None if interval is None else (float(interval[0]), float(interval[1])),
    )
