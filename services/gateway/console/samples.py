"""Sample the node's metrics in the background: every second while the console is open, every 20 seconds otherwise.

A sample holds the counters that the console reads; the difference of two samples covers the time between them. Sampling
takes a few milliseconds in a thread, off the request path.
"""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import structlog

from services.gateway.periodic_task import PeriodicTask
from services.observability.objectives import Selector

log = structlog.get_logger()

FINE_S = 180.0
KEEP_S = 3_600.0
WATCHED_EVERY_S = 1.0
IDLE_EVERY_S = 20.0
_WATCHED_FOR_S = 10.0
"""How long after the last read the console counts as open."""
_TICK_S = 1.0
_SLACK_S = 0.05

Series = tuple[str, frozenset[tuple[str, str]]]
Buckets = list[tuple[float, float]]
"""A histogram: (upper bound in seconds, observations at or below it), bounds increasing, the last bound infinite."""


@dataclass(frozen=True, slots=True)
class SeriesSelection:
    """The series that a sample keeps: these metrics, summed over all labels except these."""

    metrics: frozenset[str]
    labels: frozenset[str]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counter values by series: at one moment (`at_s`, monotonic seconds), or over the `span_s` seconds before it."""

    at_s: float
    values: Mapping[Series, float]
    span_s: float = 0.0

    def since(self, earlier: "Counts") -> "Counts":
        """Return the increase since `earlier`. A counter that fell was reset and counts from zero."""
        grown = {series: _increase(earlier.values.get(series, 0.0), value) for series, value in self.values.items()}
        return Counts(self.at_s, grown, self.at_s - earlier.at_s)

    def total(self, selector: Selector) -> float:
        return sum(value for (name, labels), value in self.values.items() if selector.selects(name, dict(labels)))

    def by_label(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sums of a metric by the values of one label."""
        sums: dict[str, float] = defaultdict(float)
        for (metric, present), value in self.values.items():
            if metric == name and labels.items() <= present:
                sums[dict(present).get(label, "")] += value
        return dict(sums)

    def buckets(self, name: str, **labels: str) -> Buckets:
        """Return a histogram, summed over all its series with these labels."""
        sums = self.by_label(f"{name}_bucket", "le", **labels)
        return sorted((float(bound), value) for bound, value in sums.items())


class SampleRing:
    """Samples, oldest first: all of the last `fine_s` seconds, and one per `thin_s` seconds of the last `keep_s`.

    Thinning, and sharing series names between samples, keep an hour of samples within about three megabytes. Pure:
    samples carry their times.
    """

    def __init__(self, fine_s: float, keep_s: float, thin_s: float) -> None:
        self._fine_s = fine_s
        self._keep_s = keep_s
        self._thin_s = thin_s
        self._fine: deque[Counts] = deque()
        self._coarse: deque[Counts] = deque()

    def add(self, sample: Counts) -> None:
        """Add a sample that is newer than all before."""
        self._fine.append(self._sharing_names(sample))
        while self._age_s(self._fine[0]) > self._fine_s + _SLACK_S:
            self._thin_out(self._fine.popleft())
        while self._coarse and self._age_s(self._coarse[0]) > self._keep_s + _SLACK_S:
            self._coarse.popleft()

    def window(self, length_s: float) -> Counts | None:
        """Return the counts of the last `length_s` seconds, or of all samples if they cover less.

        Returns None before two samples.
        """
        inside = self._last(length_s)
        return inside[-1].since(inside[0]) if len(inside) > 1 else None

    def steps(self, length_s: float) -> Iterator[Counts]:
        """Yield the counts between neighbouring samples of the last `length_s` seconds, oldest first."""
        for before, after in pairwise(self._last(length_s)):
            yield after.since(before)

    def _sharing_names(self, sample: Counts) -> Counts:
        """Return the sample with the newest sample's series objects where equal.

        Each scrape creates new names, which take six times the memory of the values.
        """
        names = {series: series for series in self._fine[-1].values} if self._fine else {}
        return replace(sample, values={names.get(series, series): value for series, value in sample.values.items()})

    def _thin_out(self, sample: Counts) -> None:
        if not self._coarse or sample.at_s - self._coarse[-1].at_s >= self._thin_s - _SLACK_S:
            self._coarse.append(sample)

    def _last(self, length_s: float) -> list[Counts]:
        return [sample for sample in (*self._coarse, *self._fine) if self._age_s(sample) <= length_s + _SLACK_S]

    def _age_s(self, sample: Counts) -> float:
        return self._fine[-1].at_s - sample.at_s


class MetricSampler:
    """Owns the ring and the task that fills it. `scrape` returns the node's metric families and may block."""

    def __init__(self, scrape: Callable[[], Iterable[Any]], series: SeriesSelection) -> None:
        self.ring = SampleRing(FINE_S, KEEP_S, IDLE_EVERY_S)
        self._scrape = scrape
        self._series = series
        self._watched_s = float("-inf")
        self._sampled_s = float("-inf")
        self._sampling = PeriodicTask("metric_samples", self._sample_if_due, _TICK_S, at_once=True)

    def watch(self) -> SampleRing:
        """Return the samples, and sample each second for a while."""
        self._watched_s = time.monotonic()
        return self.ring

    async def start(self) -> None:
        self._sampling.start()

    async def stop(self) -> None:
        await self._sampling.stop()

    async def sample(self) -> None:
        """Take one sample. Skipped if the metrics folder cannot be read (a process may have just created a file)."""
        self._sampled_s = time.monotonic()
        try:
            families = await asyncio.to_thread(lambda: list(self._scrape()))
        except Exception as error:  # noqa: BLE001 - the next scrape may succeed
            log.warning("metrics_not_sampled", error=repr(error))
            return
        self.ring.add(counts_of(families, self._series, self._sampled_s))

    async def _sample_if_due(self) -> None:
        now_s = time.monotonic()
        every_s = WATCHED_EVERY_S if now_s - self._watched_s < _WATCHED_FOR_S else IDLE_EVERY_S
        if now_s - self._sampled_s >= every_s:
            await self.sample()


def counts_of(families: Iterable[Any], series: SeriesSelection, at_s: float) -> Counts:
    """Return the selected series of a scrape (Prometheus metric families) taken at `at_s`."""
    values: dict[Series, float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            if sample.name in series.metrics:
                labels = frozenset(label for label in sample.labels.items() if label[0] in series.labels)
                values[sample.name, labels] += float(sample.value)
    return Counts(at_s, dict(values))


def quantile_s(buckets: Buckets, share: float) -> float | None:
    """Return the quantile (seconds) of a histogram, linear within a bucket as in Prometheus; None if it is empty.

    Observations beyond the last finite bound count as that bound.
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


def _increase(before: float, now: float) -> float:
    return now - before if now >= before else now
