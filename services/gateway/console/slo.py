"""The SLO tiles and the steps of the live charts, computed from counted metrics. Pure; the objectives are an argument.

An error budget covers many days and the console sees at most an hour, so it shows that hour's budget.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.contracts.recommend import Tier
from services.gateway.console.samples import Counts, SeriesSelection, quantile_s
from services.observability.objectives import Objective, Objectives, Selector, tally

REQUESTS = "tailrace_requests_total"
_REQUEST_SECONDS = "tailrace_request_seconds"
_DEADLINE_MISSED = "tailrace_deadline_missed_total"
_CHART_METRICS = frozenset({REQUESTS, _DEADLINE_MISSED, f"{_REQUEST_SECONDS}_bucket"})
_CHART_LABELS = frozenset({"tier", "code", "le"})
_OK = Selector(metric=REQUESTS, match={"code": ("ok",)})
_ALL = Selector(metric=REQUESTS)
_LATE = Selector(metric=_DEADLINE_MISSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloStatus:
    """One objective and its compliance. `good_share` is None without counts.

    `budget_left` is 1 without bad events, 0 when the budget is used up, negative beyond.
    """

    name: str
    title: str
    target: float
    good_share: float | None
    budget_left: float | None
    num_bad: int
    num_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartStep:
    """One step of the charts, which ended `age_s` ago and lasted `span_s`. `rates` are answers per second by tier."""

    age_s: float
    span_s: float
    rates: dict[str, float]
    p50_ms: float | None
    p99_ms: float | None
    num_late: int
    num_refused: int


def series_for(objectives: Objectives) -> SeriesSelection:
    """Return the series that the tiles and the charts read."""
    selectors = [
        term.selector
        for objective in objectives.objectives
        for term in (*objective.sli.total_terms, *objective.sli.bad_terms)
    ]
    return SeriesSelection(
        metrics=_CHART_METRICS | {selector.metric for selector in selectors},
        labels=_CHART_LABELS | {label for selector in selectors for label in selector.match},
    )


def slo_statuses(objectives: Objectives, counted: Counts) -> list[SloStatus]:
    """Return the compliance with each objective over the counted metrics."""
    return [_slo_status(objective, counted) for objective in objectives.objectives]


def chart_steps(steps: Iterable[Counts], now_s: float) -> list[ChartStep]:
    return [_chart_step(step, now_s) for step in steps]


def _slo_status(objective: Objective, counted: Counts) -> SloStatus:
    counts = tally(objective, counted.total)
    share = counts.good_share
    return SloStatus(
        name=objective.name,
        title=objective.title,
        target=objective.target,
        good_share=share,
        budget_left=None if share is None else 1 - (1 - share) / objective.budget,
        num_bad=round(counts.bad),
        num_total=round(counts.total),
    )


def _chart_step(step: Counts, now_s: float) -> ChartStep:
    span_s = max(step.span_s, 1e-3)
    by_tier = step.by_label(REQUESTS, "tier", code="ok")
    latencies = step.buckets(_REQUEST_SECONDS)
    return ChartStep(
        age_s=round(now_s - step.at_s, 2),
        span_s=round(span_s, 2),
        rates={tier.value: round(by_tier.get(tier.value, 0.0) / span_s, 2) for tier in Tier},
        p50_ms=_ms(quantile_s(latencies, 0.5)),
        p99_ms=_ms(quantile_s(latencies, 0.99)),
        num_late=round(step.total(_LATE)),
        num_refused=round(step.total(_ALL) - step.total(_OK)),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1_000, 2)
