"""The console's numbers against brute-force oracles: windows of samples, quantiles, SLOs, chart steps."""

import math
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.contracts.recommend import Reason, Tier
from services.gateway.console.samples import Buckets, Counts, SampleRing, counts_of, quantile_s
from services.gateway.console.slo import REQUESTS, chart_steps, series_for, slo_statuses
from services.observability.metrics import REQUEST_BUCKETS_S, GatewayMetrics, StreamMetrics
from services.observability.objectives import load_objectives

SERIES = (REQUESTS, frozenset({("tier", "llm"), ("code", "ok")}))
FINE_S, KEEP_S, THIN_S = 10.0, 100.0, 5.0


def at(seconds: float, value: float) -> Counts:
    return Counts(seconds, {SERIES: value})


def thinned(samples: list[Counts]) -> list[Counts]:
    """Apply the thinning rule naively: keep recent samples, and older samples spaced by at least THIN_S."""
    kept: list[Counts] = []
    for index in range(len(samples)):
        newest = samples[index]
        recent = [sample for sample in samples[: index + 1] if newest.at_s - sample.at_s <= FINE_S]
        retired = [sample for sample in samples[: index + 1] if newest.at_s - sample.at_s > FINE_S]
        kept = []
        for sample in retired:
            if not kept or sample.at_s - kept[-1].at_s >= THIN_S:
                kept.append(sample)
        kept = [sample for sample in kept if newest.at_s - sample.at_s <= KEEP_S] + recent
    return kept


@given(st.lists(st.integers(1, 8), min_size=2, max_size=60), st.integers(1, 130))
def test_windows_and_steps_equal_a_plain_list(gaps: list[int], length_s: int) -> None:
    """For any sampling times the ring equals a list of all samples, thinned by the rule."""
    times = [float(sum(gaps[: index + 1])) for index in range(len(gaps))]
    samples = [at(time_s, 3.0 * index) for index, time_s in enumerate(times)]
    ring = SampleRing(FINE_S, KEEP_S, THIN_S)
    for sample in samples:
        ring.add(sample)
    inside = [sample for sample in thinned(samples) if times[-1] - sample.at_s <= length_s]

    window, steps = ring.window(length_s), list(ring.steps(length_s))

    if len(inside) < 2:
        assert window is None
    else:
        assert window is not None
        assert window.span_s == inside[-1].at_s - inside[0].at_s
        assert window.values[SERIES] == inside[-1].values[SERIES] - inside[0].values[SERIES]
    expected = [after.values[SERIES] - before.values[SERIES] for before, after in pairwise(inside)]
    assert [step.values[SERIES] for step in steps] == expected


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    """A restarted process does not show negative traffic."""
    assert at(2.0, 3.0).since(at(1.0, 50.0)).values[SERIES] == 3.0


def buckets_of(values: Iterable[float]) -> Buckets:
    """Return the request histogram of these values."""
    bounds = (*REQUEST_BUCKETS_S, math.inf)
    numbers = list(values)
    return [(bound, float(sum(value <= bound for value in numbers))) for bound in bounds]


@given(st.lists(st.floats(0.0001, 4.9), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    """The histogram's quantile is in the same bucket as the quantile of the sorted values."""
    true_value = sorted(values)[math.ceil(share * len(values)) - 1]
    upper = next(bound for bound in REQUEST_BUCKETS_S if true_value <= bound)
    lower = max((bound for bound in REQUEST_BUCKETS_S if bound < upper), default=0.0)

    quantile = quantile_s(buckets_of(values), share)

    assert quantile is not None
    assert lower - 1e-12 <= quantile <= upper + 1e-12


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [([], None), ([(0.1, 0.0), (math.inf, 0.0)], None), ([(0.1, 0.0), (math.inf, 7.0)], 0.1), ([(0.1, 4.0)], 0.05)],
)
def test_quantiles_at_the_edges(buckets: Buckets, expected: float | None) -> None:
    """The result is None if empty, the last finite bound beyond it, and linear within a bucket."""
    assert quantile_s(buckets, 0.5) == expected


def test_slos_are_counted_from_the_real_metrics() -> None:
    """Fractions, totals and remaining budgets follow from the real metrics and objectives."""
    registry, objectives = CollectorRegistry(), load_objectives()
    gateway, stream, series = GatewayMetrics(registry), StreamMetrics(registry), series_for(objectives)
    before = counts_of(registry.collect(), series, 0.0)
    for seconds in (0.004, 0.15, 0.9, 0.01):
        gateway.requests.labels("rest", Tier.LLM, Reason.LLM_IN_TIME, "ok").inc()
        gateway.request_seconds.labels("rest", Tier.LLM).observe(seconds)
    gateway.requests.labels("grpc", "none", "none", "internal").inc()
    gateway.deadline_missed.labels("rest").inc()
    stream.visible_seconds.observe(0.05)

    counted = counts_of(registry.collect(), series, 60.0).since(before)
    statuses = {status.name: status for status in slo_statuses(objectives, counted)}

    assert (statuses["availability"].num_bad, statuses["availability"].num_total) == (1, 5)
    assert statuses["availability"].good_share == pytest.approx(0.8)
    assert statuses["availability"].budget_left == pytest.approx(1 - 0.2 / 0.001)
    assert (statuses["deadline"].num_bad, statuses["deadline"].num_total) == (1, 4)
    assert (statuses["latency_llm"].num_bad, statuses["latency_llm"].num_total) == (1, 4)
    assert (statuses["freshness"].good_share, statuses["freshness"].budget_left) == (1.0, 1.0)
    assert statuses["latency_popular"].good_share is None
    assert statuses["latency_popular"].budget_left is None


def test_chart_steps_are_rates_per_second_by_tier() -> None:
    """Four answers in a two-second step are two per second; every tier is present; rejections are counted."""
    registry, series = CollectorRegistry(), series_for(load_objectives())
    gateway = GatewayMetrics(registry)
    before = counts_of(registry.collect(), series, 10.0)
    for _ in range(4):
        gateway.requests.labels("rest", Tier.STUDENT, Reason.LLM_UNAVAILABLE, "ok").inc()
        gateway.request_seconds.labels("rest", Tier.STUDENT).observe(0.004)
    gateway.requests.labels("rest", "none", "none", "overloaded").inc()
    step = counts_of(registry.collect(), series, 12.0).since(before)

    (shown,) = chart_steps([step], now_s=13.0)

    assert shown.rates == {tier.value: 2.0 * (tier is Tier.STUDENT) for tier in Tier}
    assert (shown.age_s, shown.span_s, shown.num_refused, shown.num_late) == (1.0, 2.0, 1, 0)
    assert shown.p50_ms == pytest.approx(3.75)
