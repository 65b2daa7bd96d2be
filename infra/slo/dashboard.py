"""Grafana's dashboard of the objectives: a row each, with good fraction, burn rates over the alert windows, and budget.

The other dashboards are maintained as the JSON that Grafana reads and exports.
"""

import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from infra.slo.rules import BAD, BUDGET_LEFT, ENVIRONMENT, JOB, TOTAL, burn_metric
from services.observability.objectives import Objective, Objectives

_SOURCE_NAME = "datasource"
_SOURCE = DataSourceRef(type_val="prometheus", uid=f"${{{_SOURCE_NAME}}}")
"""The Prometheus selected on the dashboard: a cluster's Grafana has its own data source under its own uid."""
_BURN_HELP = "1 spends the whole budget in the window of the objective; 14.4 spends a month's budget in two days."


def objectives_dashboard(promised: Objectives) -> dict[str, Any]:
    """Return the dashboard's JSON."""
    made = (
        dashboard.Dashboard("Tailrace: objectives")
        .uid("tailrace-objectives")
        .description("The objectives of infra/prometheus/objectives.yaml and how well they are met.")
        .tags(["tailrace"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable(_SOURCE_NAME).label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable(ENVIRONMENT)
            .label("Environment")
            .datasource(_SOURCE)
            .query(f'label_values(up{{job=~"{JOB}"}}, {ENVIRONMENT})')
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
        )
        .link(dashboard.DashboardLink("Tailrace").type(DashboardLinkType.DASHBOARDS).tags(["tailrace"]).keep_time(True))
    )
    panels = 0
    for objective in promised.objectives:
        made = made.with_row(dashboard.Row(f"{objective.title}: {objective.target * 100:g} %"))
        for panel in _panels(objective, promised):
            panels += 1
            made = made.with_panel(panel.id(panels).datasource(_SOURCE).span(8).height(8))
    content: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return content


def _panels(objective: Objective, promised: Objectives) -> tuple[Any, ...]:
    chosen = f'{{slo="{objective.name}", {ENVIRONMENT}=~"${ENVIRONMENT}"}}'
    windows = dict.fromkeys((promised.onset.window, *(rung.long for rung in promised.ladder)))
    good = _lines("Good share over 5 minutes", {"good": f"1 - {BAD}{chosen} / ({TOTAL}{chosen} > 0)"})
    burn = _lines("Burn rate", {window: burn_metric(window) + chosen for window in windows}).description(_BURN_HELP)
    left = stat.Panel().title(f"Budget left of {promised.window_days} days").description("").unit("percentunit")
    query = prometheus.Dataquery().expr(BUDGET_LEFT + chosen).legend_format("left").ref_id("A").instant()
    return (
        good.unit("percentunit").thresholds(_thresholds("red", objective.target, "green")),
        burn.unit("short").thresholds(_thresholds("green", min(rung.burn for rung in promised.ladder), "red")),
        left.thresholds(_thresholds("red", 0.0, "green")).with_target(query),
    )


def _lines(title: str, queries: dict[str, str]) -> Any:
    """Return a time-series panel of these expressions by legend."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = timeseries.Panel().title(title).description("").legend(legend.show_legend(True)).min(0)
    for ref_id, (name, expr) in zip("ABCDEFGH", queries.items(), strict=False):
        panel = panel.with_target(prometheus.Dataquery().expr(expr).legend_format(name).ref_id(ref_id).range())
    return panel


def _thresholds(below: str, border: float, above: str) -> Any:
    steps = [Threshold(value=None, color=below), Threshold(value=border, color=above)]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
