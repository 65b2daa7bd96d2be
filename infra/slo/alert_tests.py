"""promtool unit tests of the objectives' alerts: each fires at its burn rate, and none fires below.

A test has good traffic, then a burn, for all objectives that can run at once without sharing series, in one
environment; at the onset of a burn, another environment has the same traffic, all of it good. One file per time step,
since promtool evaluates a file at one interval. Counters are chosen so that each burn rate is exact.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from infra.slo.rules import DATA_MISSING, ENVIRONMENT, groups
from services.observability.objectives import Bounded, Objective, Objectives, Ratio, Selector, seconds_of

PER_STEP = 10_000
"""Events per step: enough to make the bad events of each burn a whole number."""

_BELOW = 0.9
_EVERY_ALERT = f'ALERTS{{slo!="", alertname!="{DATA_MISSING}"}}'
_BURNING, _GOOD = "prod", "staging"
_GOOD_BEFORE_S = 3_600
_ONSET_STEP_S = 15
_ONSET_WITHIN_S = 120
_STEPS_PER_SHORT_WINDOW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Good traffic for `before_s`, then `burn` times too many bad events for `burning_s`, counted every `step_s`."""

    objectives: tuple[Objective, ...]
    burn: float
    before_s: int
    burning_s: int
    step_s: int

    @property
    def end_s(self) -> int:
        """The last evaluation time."""
        return self.before_s + self.burning_s


def files(objectives: Objectives, rule_file: str) -> dict[str, dict[str, Any]]:
    """Return test files by time step, such as `15s`; `rule_file` is relative to them."""
    tests: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step_s, test in _tests(objectives):
        tests[f"{step_s}s"].append(test)
    return {
        step: {"rule_files": [rule_file], "evaluation_interval": step, "tests": theirs}
        for step, theirs in tests.items()
    }


def _tests(objectives: Objectives) -> Iterator[tuple[int, dict[str, Any]]]:
    for is_scraped in (False, True):
        yield _ONSET_STEP_S, _lacks_data(objectives, is_scraped=is_scraped)
    for batch in _batches(objectives.objectives):
        onset = Scenario(
            objectives=batch,
            burn=objectives.onset.burn,
            before_s=_GOOD_BEFORE_S,
            burning_s=_ONSET_WITHIN_S,
            step_s=_ONSET_STEP_S,
        )
        yield onset.step_s, _fires(onset, objectives, objectives.onset.window)
        for rung in objectives.ladder:
            long_s = seconds_of(rung.long)
            step_s = seconds_of(rung.short) // _STEPS_PER_SHORT_WINDOW
            times = {"before_s": long_s, "burning_s": long_s, "step_s": step_s}
            burning = Scenario(objectives=batch, burn=rung.burn, **times)
            yield step_s, _fires(burning, objectives, f"{rung.long} and {rung.short}")
            yield step_s, _is_silent(Scenario(objectives=batch, burn=_BELOW, **times))


def _batches(objectives: tuple[Objective, ...]) -> list[tuple[Objective, ...]]:
    """Group objectives that share no series."""
    batches: list[list[Objective]] = []
    for objective in objectives:
        batch = next((batch for batch in batches if not any(_overlap(objective, other) for other in batch)), None)
        if batch is None:
            batches.append([objective])
        else:
            batch.append(objective)
    return [tuple(batch) for batch in batches]


def _overlap(objective: Objective, other: Objective) -> bool:
    """Whether two objectives may count one series: the same metric, without a label that separates them."""
    mine, theirs = ((*side.sli.total_terms, *side.sli.bad_terms) for side in (objective, other))
    return any(
        a.selector.metric == b.selector.metric and not _apart(a.selector, b.selector) for a in mine for b in theirs
    )


def _apart(selector: Selector, other: Selector) -> bool:
    shared = (selector.match.keys() & other.match.keys()) - {"le"}
    return any(not set(selector.match[label]) & set(other.match[label]) for label in shared)


def _fires(scenario: Scenario, objectives: Objectives, window: str) -> dict[str, Any]:
    """At the end the alert of this window fires with its exact labels and annotations; before the burn, none fires."""
    alerts = [_alert_of(objective, objectives, window) for objective in scenario.objectives]
    test = _test(scenario, f"fires over {window}")
    test["promql_expr_test"] = [
        {"expr": _EVERY_ALERT, "eval_time": f"{scenario.before_s}s", "exp_samples": []},
        *(_is_firing(alert, scenario.end_s) for alert in alerts),
    ]
    if scenario.burning_s == _ONSET_WITHIN_S:
        test["alert_rule_test"] = [
            _exactly(scenario, name, [alert for alert in alerts if alert["alert"] == name])
            for name in dict.fromkeys(alert["alert"] for alert in alerts)
        ]
    return test


def _is_firing(alert: dict[str, Any], at_s: int) -> dict[str, Any]:
    labels = {"alertname": alert["alert"], "alertstate": "firing", ENVIRONMENT: _BURNING, **alert["labels"]}
    matchers = ", ".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    series = f"ALERTS{{{matchers}}}"
    return {"expr": series, "eval_time": f"{at_s}s", "exp_samples": [{"labels": series, "value": 1}]}


def _exactly(scenario: Scenario, name: str, alerts: list[dict[str, Any]]) -> dict[str, Any]:
    """Exactly these alerts of this name, with exact text."""
    burn = f"{scenario.burn:g}"
    expected = [
        {
            "exp_labels": {**alert["labels"], ENVIRONMENT: _BURNING},
            "exp_annotations": {
                key: text.replace("{{ $value | humanize }}", burn) for key, text in alert["annotations"].items()
            },
        }
        for alert in alerts
    ]
    return {"eval_time": f"{scenario.end_s}s", "alertname": name, "exp_alerts": expected}


def _is_silent(scenario: Scenario) -> dict[str, Any]:
    """No objective's alert has fired at any time."""
    ever = f"count_over_time({_EVERY_ALERT}[{scenario.end_s}s])"
    test = _test(scenario, "is silent")
    test["promql_expr_test"] = [{"expr": ever, "eval_time": f"{scenario.end_s}s", "exp_samples": []}]
    return test


def _test(scenario: Scenario, outcome: str) -> dict[str, Any]:
    return {
        "name": (
            f"{', '.join(objective.name for objective in scenario.objectives)}: {scenario.burn:g} times for "
            f"{scenario.burning_s} s {outcome}"
        ),
        "interval": f"{scenario.step_s}s",
        "input_series": [
            {"series": name, "values": values}
            for objective in scenario.objectives
            for traffic, where in _environments(scenario)
            for name, values in _series(traffic, objective, where)
        ],
    }


def _environments(scenario: Scenario) -> list[tuple[Scenario, str]]:
    """Return the burning environment and, in the shortest scenario, another that must neither dilute it nor burn."""
    is_onset = scenario.burning_s == _ONSET_WITHIN_S
    return [(scenario, _BURNING), *([(replace(scenario, burn=0), _GOOD)] if is_onset else ())]


def _lacks_data(objectives: Objectives, *, is_scraped: bool) -> dict[str, Any]:
    """Without series, each objective's missing-data alert fires and names an environment that was scraped."""
    alerts = [_alert_of(objective, objectives, None) for objective in objectives.objectives]
    where = {ENVIRONMENT: _BURNING} if is_scraped else {}
    up = f'up{{job="{_BURNING}/tailrace", {ENVIRONMENT}="{_BURNING}"}}'
    return {
        "name": f"missing data raise an alert{' in their environment' if is_scraped else ''}",
        "interval": f"{_ONSET_STEP_S}s",
        "input_series": [{"series": up, "values": "1x40"}] if is_scraped else [],
        "alert_rule_test": [
            {"eval_time": "4m", "alertname": DATA_MISSING, "exp_alerts": []},
            {
                "eval_time": "6m",
                "alertname": DATA_MISSING,
                "exp_alerts": [
                    {"exp_labels": {**alert["labels"], **where}, "exp_annotations": alert["annotations"]}
                    for alert in alerts
                ],
            },
        ],
    }


def _alert_of(objective: Objective, objectives: Objectives, window: str | None) -> dict[str, Any]:
    """Return the objective's generated alert over this window, or its missing-data alert."""
    rules = [rule for group in groups(objectives) for rule in group["rules"] if "alert" in rule]
    return next(
        rule for rule in rules if rule["labels"]["slo"] == objective.name and rule["labels"].get("window") == window
    )


def _series(scenario: Scenario, objective: Objective, where: str) -> list[tuple[str, str]]:
    """Counters of an environment with the burn's fraction of bad events from its start, and no bad events before."""
    num_bad = round(PER_STEP * scenario.burn * objective.budget, 6)
    good, bad, total = (
        _counter(scenario, before, after)
        for before, after in ((PER_STEP, PER_STEP - num_bad), (0, num_bad), (PER_STEP, PER_STEP))
    )
    match objective.sli:
        case Ratio(total=all_, bad=wrong) if wrong.metric == all_.metric:
            return [(_name(Selector(metric=all_.metric), where), good), (_name(wrong, where), bad)]
        case Ratio(total=all_, bad=wrong):
            return [(_name(all_, where), total), (_name(wrong, where), bad)]
        case Bounded() as bounded:
            border = bounded.bad_terms[-1].selector
            below = bad if bounded.at_most is None else good
            return [(_name(bounded.total_terms[0].selector, where), total), (_name(border, where), below)]


def _name(chosen: Selector, where: str) -> str:
    """Name one series of an environment that the selector selects."""
    match = {**chosen.match, ENVIRONMENT: (where,)}
    labels = ", ".join(f'{label}="{values[0]}"' for label, values in match.items())
    return f"{chosen.metric}{{{labels}}}"


def _counter(scenario: Scenario, before: float, after: float) -> str:
    """Write a counter that grows by `before` per step, then by `after`."""
    num_before, num_after = scenario.before_s // scenario.step_s, scenario.burning_s // scenario.step_s
    at_change = num_before * before
    return f"0+{before:g}x{num_before} {at_change + after:g}+{after:g}x{num_after - 1}"
