"""The objectives as Prometheus rules: the burn rate of each budget over each window, and its alerts.

One Prometheus may scrape several environments: every rule is evaluated per environment, by the label that the
Prometheus operator adds to a pod's series. Series without the label form one environment.

Alerts are in one group with their windows, because a group's rules run in order: alerts see values recorded in the same
evaluation, so a fast burn alerts within a minute, a scrape and an evaluation.
"""

import re
from collections.abc import Iterable
from typing import Any

from services.observability.objectives import Objective, Objectives, Onset, Rung, Selector, SignedSelector, seconds_of

Rule = dict[str, Any]

ENVIRONMENT = "namespace"
JOB = "(.+/)?tailrace"
"""The scrape job: `tailrace` in prometheus.yml, `<namespace>/tailrace` by the Prometheus operator's PodMonitor."""
_SCRAPED = f'max_over_time(up{{job=~"{JOB}"}}[1d])'

BAD, TOTAL, BUDGET_LEFT = "tailrace:slo_bad:rate5m", "tailrace:slo_total:rate5m", "tailrace:slo_budget_left:ratio"
DATA_MISSING = "TailraceSloDataMissing"
DATA_MISSING_FOR = "5m"
_BUDGET_EVERY = "5m"


def burn_metric(window: str) -> str:
    """Name the recorded burn rate over a window."""
    return f"tailrace:slo_burn:rate{window}"


def groups(objectives: Objectives) -> list[dict[str, Any]]:
    """Return the rule groups."""
    promised, windows = objectives.objectives, [objectives.onset.window, *_windows(objectives.ladder)]
    return [
        {
            "name": "tailrace-slo",
            "rules": [_burn(objective, window) for objective in promised for window in windows]
            + [rule for objective in promised for rule in _sums(objective)]
            + [_onset(objective, objectives.onset, objectives.runbooks) for objective in promised]
            + [_rung(objective, rung, objectives.runbooks) for objective in promised for rung in objectives.ladder]
            + [_data_missing(objective, objectives.runbooks) for objective in promised],
        },
        {
            "name": "tailrace-slo-budget",
            "interval": _BUDGET_EVERY,
            "rules": [_budget_left(objective, objectives.window_days) for objective in promised],
        },
    ]


def _windows(rungs: Iterable[Rung]) -> list[str]:
    return sorted({window for rung in rungs for window in (rung.long, rung.short)}, key=seconds_of)


def _burn(objective: Objective, window: str) -> Rule:
    return {"record": burn_metric(window), "expr": burn_rate(objective, window), "labels": {"slo": objective.name}}


def _sums(objective: Objective) -> list[Rule]:
    labels = {"slo": objective.name}
    return [
        {"record": BAD, "expr": over(objective.sli.bad_terms, "rate", "5m"), "labels": labels},
        {"record": TOTAL, "expr": over(objective.sli.total_terms, "rate", "5m"), "labels": labels},
    ]


def _budget_left(objective: Objective, days: int) -> Rule:
    """Return the rule for the remaining budget fraction.

    It uses recorded sums: raw counters over a month would be millions of samples.
    """
    bad, total = (f'sum_over_time({metric}{{slo="{objective.name}"}}[{days}d])' for metric in (BAD, TOTAL))
    spent = f"{bad} / (clamp_min({total}, 1e-9) * {objective.budget:g})"
    return {"record": BUDGET_LEFT, "expr": f"1 - {spent}", "labels": {"slo": objective.name}}


def _onset(objective: Objective, onset: Onset, runbooks: str) -> Rule:
    burning = _at_least(objective, onset.window, onset.burn)
    bad = over(objective.sli.bad_terms, "increase", onset.window)
    expr = f"{burning} and on ({ENVIRONMENT}) ({bad}) >= {onset.min_bad}"
    return _alert(objective, expr, onset.severity, onset.window, runbooks)


def _rung(objective: Objective, rung: Rung, runbooks: str) -> Rule:
    expr = " and ".join(_at_least(objective, window, rung.burn) for window in (rung.long, rung.short))
    return _alert(objective, expr, rung.severity, f"{rung.long} and {rung.short}", runbooks)


def _at_least(objective: Objective, window: str, burn: float) -> str:
    return f'{burn_metric(window)}{{slo="{objective.name}"}} >= {burn:g}'


def _alert(objective: Objective, expr: str, severity: str, window: str, runbooks: str) -> Rule:
    return {
        "alert": objective.alert,
        "expr": expr,
        "labels": {"severity": severity, "slo": objective.name, "window": window},
        "annotations": {
            "summary": f"{objective.title}: the budget burns {{{{ $value | humanize }}}} times too fast",
            "description": f"Over {window}. The objective is {objective.target * 100:g} %.",
            "runbook_url": f"{runbooks}/{objective.alert}.md",
        },
    }


def _data_missing(objective: Objective, runbooks: str) -> Rule:
    return {
        "alert": DATA_MISSING,
        "expr": any_absent(objective),
        "for": DATA_MISSING_FOR,
        "labels": {"severity": "ticket", "slo": objective.name},
        "annotations": {
            "summary": f"{objective.name} cannot be evaluated: its metrics are missing",
            "description": "The series of this objective do not exist in Prometheus.",
            "runbook_url": f"{runbooks}/{DATA_MISSING}.md",
        },
    }


_NO_TRAFFIC = "1e-9"
_PLAIN = re.compile(r"[\w.]+")


def selector(chosen: Selector, span: str | None = None) -> str:
    """Write a selector, with an optional range. Raises ValueError for alternatives that are not plain words."""
    matchers = ", ".join(_matcher(label, values) for label, values in chosen.match.items())
    return chosen.metric + (f"{{{matchers}}}" if matchers else "") + (f"[{span}]" if span else "")


def over(terms: tuple[SignedSelector, ...], function: str, span: str) -> str:
    """Write the signed sum of terms, each through rate or increase over a window."""
    signed = [(term.sign, f"sum by ({ENVIRONMENT}) ({function}({selector(term.selector, span)}))") for term in terms]
    return signed[0][1] + "".join(f" {'+' if sign > 0 else '-'} {text}" for sign, text in signed[1:])


def burn_rate(objective: Objective, span: str) -> str:
    """Write the burn rate of the budget over a window; 0 without traffic.

    It is rounded to two decimals, so that a burn of exactly 14.4 is not slightly less.
    """
    bad = over(objective.sli.bad_terms, "rate", span)
    total = over(objective.sli.total_terms, "rate", span)
    return f"round(({bad}) / clamp_min({total}, {_NO_TRAFFIC}) / {objective.budget:g}, 0.01)"


def any_absent(objective: Objective) -> str:
    """Write a query that returns a sample for each environment without a metric of the objective.

    Only bucket bounds are matched by label: other series of a metric appear with their first event.
    """
    terms = (*objective.sli.total_terms, *objective.sli.bad_terms)
    selectors = dict.fromkeys(selector(_bucket_only(term.selector)) for term in terms)
    return lacking(*selectors)


def lacking(*series: str) -> str:
    """Write a query that returns a sample for each environment of the last day without one of these series.

    Without any environment, it returns one sample.
    """
    scraped = f"group by ({ENVIRONMENT}) ({_SCRAPED})"
    queries = [f"{scraped} unless group by ({ENVIRONMENT}) ({wanted})" for wanted in series]
    return " or ".join((*queries, f"absent({_SCRAPED})"))


def _bucket_only(chosen: Selector) -> Selector:
    return Selector(metric=chosen.metric, match={label: v for label, v in chosen.match.items() if label == "le"})


def _matcher(label: str, values: tuple[str, ...]) -> str:
    if len(values) == 1:
        return f'{label}="{values[0]}"'
    for value in values:
        if not _PLAIN.fullmatch(value):
            raise ValueError(f"{label}: {value!r} is a pattern; give plain text")
    return f'{label}=~"{"|".join(values)}"'
