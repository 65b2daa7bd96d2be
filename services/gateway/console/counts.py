"""What the node's metrics have counted up to one moment, and what was counted between two. Pure.

Quantiles are read from histogram buckets as Prometheus reads them: linear within a bucket.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.observability.objectives import Selector

REQUESTS = "tailrace_requests_total"
REQUEST_SECONDS = "tailrace_request_seconds"
MISSED = "tailrace_deadline_missed_total"

Series = tuple[str, frozenset[tuple[str, str]]]
Buckets = list[tuple[float, float]]
"""(upper bound in seconds, how many were at most that), bounds rising, the last one infinite."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a scrape: series of these metrics, summed over all labels but these."""

    metrics: frozenset[str]
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Counts:
    """Values by series at one moment (`at_s`, monotonic seconds), or what came between two moments (`span_s` long)."""

    at_s: float
    values: Mapping[Series, float]
    span_s: float = 0.0

    def since(self, earlier: "Counts") -> "Counts":
        """Return what was counted after `earlier`. A counter that fell was started anew and counts from zero."""
        grown = {series: _growth(earlier.values.get(series, 0.0), value) for series, value in self.values.items()}
        return Counts(self.at_s, grown, self.at_s - earlier.at_s)

    def total(self, selector: Selector) -> float:
        """Sum the series that a selector selects."""
        return sum(value for (name, labels), value in self.values.items() if selector.selects(name, dict(labels)))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sum a metric by the values of one label."""
        sums: dict[str, float] = defaultdict(float)
        for (found, given), value in self.values.items():
            if found == name and labels.items() <= given:
                sums[dict(given).get(label, "")] += value
        return dict(sums)

    def buckets(self, name: str, **labels: str) -> Buckets:
        """Return a histogram, summed over all its series with these labels."""
        sums = self.by_label(f"{name}_bucket", "le", **labels)
        return sorted((float(bound), value) for bound, value in sums.items())


def counts_of(families: Iterable[Any], kept: Kept, at_s: float) -> Counts:
    """Keep what is wanted of a scrape (Prometheus metric families) taken at `at_s`."""
    values: dict[Series, float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            if sample.name in kept.metrics:
                labels = frozenset(label for label in sample.labels.items() if label[0] in kept.labels)
                values[sample.name, labels] += float(sample.value)
    return Counts(at_s, dict(values))


def quantile_s(buckets: Buckets, share: float) -> float | None:
    """Return the value (seconds) below which this share of a histogram lies; None when it is empty.

    What lies beyond the last finite bound counts as that bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound, at_most in buckets:
        if at_most >= rank and at_most > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (at_most - below)
        if not math.isinf(bound):
            lower, below = bound, at_most
    return lower


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now
