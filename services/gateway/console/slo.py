"""The SLO strip and the two live charts, from counted metrics. Pure; the objectives are handed in.

A budget is spent over many days and this page sees an hour at most, so what is left of it is said of that hour.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.contracts.recommend import Tier
from services.gateway.console.counts import MISSED, REQUEST_SECONDS, REQUESTS, Counts, Kept, quantile_s
from services.observability.objectives import Objective, Objectives, Selector, tally

_ALWAYS = frozenset({REQUESTS, MISSED, f"{REQUEST_SECONDS}_bucket"})
_LABELS = frozenset({"tier", "code", "le"})
_OK = Selector(metric=REQUESTS, match={"code": ("ok",)})
_ALL = Selector(metric=REQUESTS)
_LATE = Selector(metric=MISSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloStatus:
    """One objective and how it was kept. `good_share` is None when there was nothing to count.

    `budget_left` is 1 when nothing went wrong, 0 when all that may go wrong did, negative beyond.
    """

    name: str
    title: str
    target: float
    good_share: float | None
    budget_left: float | None
    num_bad: int
    num_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What happened in one step of the charts: `age_s` before now, for `span_s` seconds. Rates are answers per second."""

    age_s: float
    span_s: float
    rates: dict[str, float]
    p50_ms: float | None
    p99_ms: float | None
    num_late: int
    num_refused: int


def kept_for(objectives: Objectives) -> Kept:
    """Say which series the strip and the charts read."""
    selectors = [term.selector for one in objectives.objectives for term in (*one.sli.total_terms, *one.sli.bad_terms)]
    return Kept(
        metrics=_ALWAYS | {selector.metric for selector in selectors},
        labels=_LABELS | {label for selector in selectors for label in selector.match},
    )


def promises(objectives: Objectives, counted: Counts) -> list[SloStatus]:
    """Say how each objective was kept over what was counted."""
    return [_promise(objective, counted) for objective in objectives.objectives]


def moments(steps: Iterable[Counts], now_s: float) -> list[Moment]:
    """Return the charts' steps."""
    return [_moment(step, now_s) for step in steps]


def _promise(objective: Objective, counted: Counts) -> SloStatus:
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


def _moment(step: Counts, now_s: float) -> Moment:
    span_s = max(step.span_s, 1e-3)
    by_tier = step.by_label(REQUESTS, "tier", code="ok")
    answered = step.buckets(REQUEST_SECONDS)
    num_ok = step.total(_OK)
    return Moment(
        age_s=round(now_s - step.at_s, 2),
        span_s=round(span_s, 2),
        rates={tier.value: round(by_tier.get(tier.value, 0.0) / span_s, 2) for tier in Tier},
        p50_ms=_ms(quantile_s(answered, 0.5)),
        p99_ms=_ms(quantile_s(answered, 0.99)),
        num_late=round(step.total(_LATE)),
        num_refused=round(step.total(_ALL) - num_ok),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1_000, 2)
