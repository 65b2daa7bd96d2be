"""Queries, panels and boards as values, and their rendering to Grafana's JSON."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
)

_SOURCE_NAME = "datasource"
SOURCE = DataSourceRef(type_val="prometheus", uid=f"${{{_SOURCE_NAME}}}")
"""The Prometheus chosen on the dashboard: a cluster's Grafana has its own data source under its own uid."""
RANGE = "$__rate_interval"
"""Grafana's interval variable: at least four scrapes."""

Kind = Literal["lines", "areas", "stat", "bars"]
_WIDTHS = {1: 24, 2: 12, 3: 8, 4: 6}
_HEIGHT = 8


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; `legend` names its series, {{label}} by {{label}}."""

    expr: str
    legend: str = ""


def rate(metric: str, by: str = "", match: str = "") -> Query:
    """Per second, summed by labels."""
    grouped = f" by ({by})" if by else ""
    return Query(f"sum{grouped} (rate({metric}{_braced(match)}[{RANGE}]))", _legend(by))


def share(metric: str, part: str, whole: str = "", by: str = "") -> Query:
    """The share of a counter that matches `part`, out of what matches `whole`."""
    grouped = f" by ({by})" if by else ""
    some, all_ = (f"sum{grouped} (rate({metric}{_braced(match)}[{RANGE}]))" for match in (part, whole))
    return Query(f"{some} / {all_}", _legend(by))


def quantile(q: float, histogram: str, by: str = "") -> Query:
    """A quantile of a histogram's observations, by labels."""
    labels = f"{by}, le" if by else "le"
    expr = f"histogram_quantile({q:g}, sum by ({labels}) (rate({histogram}_bucket[{RANGE}])))"
    return Query(expr, f"{_legend(by)} p{q * 100:g}".strip())


def mean(histogram: str) -> Query:
    """The mean of a histogram's observations."""
    return Query(f"sum (rate({histogram}_sum[{RANGE}])) / sum (rate({histogram}_count[{RANGE}]))", "mean")


def _braced(match: str) -> str:
    return f"{{{match}}}" if match else ""


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")) if by else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `unit` is Grafana's unit name; values from `bad_from` (or below `bad_below`) are red. `help` is its description."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "lines"
    help: str = ""
    bad_from: float | None = None
    bad_below: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side, one to four, under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard; `name` is its file name and, after `tailrace-`, its uid. `help` is its description."""

    name: str
    title: str
    help: str
    rows: tuple[Row, ...]


def render(board: Board) -> dict[str, Any]:
    """Return the dashboard's JSON."""
    made = (
        dashboard.Dashboard(f"Tailrace: {board.title}")
        .uid(f"tailrace-{board.name}")
        .description(board.help)
        .tags(["tailrace"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable(_SOURCE_NAME).label("Prometheus").type("prometheus"))
        .link(dashboard.DashboardLink("Tailrace").type(DashboardLinkType.DASHBOARDS).tags(["tailrace"]).keep_time(True))
    )
    number = 0
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_panel(panel, number, _WIDTHS[len(row.panels)]))
    content: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return content


def _panel(panel: Panel, number: int, width: int) -> Any:
    made = _kind(panel).id(number).title(panel.title).description(panel.help).unit(panel.unit)
    made = made.datasource(SOURCE).span(width).height(_HEIGHT).thresholds(_thresholds(panel))
    for place, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + place))
        made = made.with_target(target.range() if panel.kind in ("lines", "areas") else target.instant())
    return made


def _kind(panel: Panel) -> Any:
    match panel.kind:
        case "stat":
            return stat.Panel()
        case "bars":
            return bargauge.Panel()
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    lines = timeseries.Panel().legend(legend.show_legend(True)).min(0)
    if panel.kind == "areas":
        return lines.fill_opacity(30).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return lines


def _thresholds(panel: Panel) -> Any:
    steps = [Threshold(value=None, color="red" if panel.bad_below is not None else "green")]
    if panel.bad_below is not None:
        steps.append(Threshold(value=panel.bad_below, color="green"))
    if panel.bad_from is not None:
        steps.append(Threshold(value=panel.bad_from, color="red"))
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
