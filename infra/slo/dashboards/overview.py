"""The overview dashboard: objectives met, answers by tier, and firing alerts."""

from infra.slo.dashboards.board import RANGE, Board, Panel, Query, Row, quantile, rate
from infra.slo.rules import BUDGET_LEFT

BOARD = Board(
    name="overview",
    title="overview",
    help="Objectives, answers by tier, latency, freshness.",
    rows=(
        Row(
            "Promises",
            (
                Panel(
                    title="Budget left this month",
                    queries=(Query(BUDGET_LEFT, "{{slo}}"),),
                    unit="percentunit",
                    kind="bars",
                    bad_below=0.0,
                    help="1: no bad events in the window; 0: the budget is spent; below 0: the objective is missed.",
                ),
                Panel(
                    title="Firing alerts",
                    queries=(
                        Query(
                            'sum by (alertname, slo, severity) (ALERTS{alertname=~"Tailrace.+", alertstate="firing"})',
                            "{{alertname}} {{slo}} {{severity}}",
                        ),
                    ),
                    kind="stat",
                    bad_from=1,
                    help="Each alert has a page in docs/runbooks.",
                ),
            ),
        ),
        Row(
            "Answers",
            (
                Panel(
                    title="Answers by tier",
                    queries=(rate("tailrace_requests_total", "tier", 'code="ok"'),),
                    unit="reqps",
                    kind="areas",
                ),
                Panel(
                    title="Answers by reason",
                    queries=(rate("tailrace_requests_total", "reason", 'code="ok"'),),
                    unit="reqps",
                    kind="areas",
                ),
                Panel(
                    title="Refusals and errors by code",
                    queries=(rate("tailrace_requests_total", "code", 'code!="ok"'),),
                    unit="reqps",
                ),
            ),
        ),
        Row(
            "In time",
            (
                Panel(
                    title="Latency by tier, p99",
                    queries=(quantile(0.99, "tailrace_request_seconds", "tier"),),
                    unit="s",
                ),
                Panel(
                    title="Answers after their deadline",
                    queries=(rate("tailrace_deadline_missed_total", "door"),),
                    unit="reqps",
                    bad_from=0.001,
                ),
                Panel(title="Stages, p99", queries=(quantile(0.99, "tailrace_stage_seconds", "stage"),), unit="s"),
            ),
        ),
        Row(
            "Fresh",
            (
                Panel(
                    title="Event accepted until visible",
                    queries=(
                        quantile(0.5, "tailrace_event_to_visible_seconds"),
                        quantile(0.99, "tailrace_event_to_visible_seconds"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Age of the newest event included in an answer",
                    queries=(quantile(0.5, "tailrace_feature_age_seconds"),),
                    unit="s",
                ),
                Panel(
                    title="Load shedding",
                    queries=(Query("max(tailrace_admission_strain)", "strain"),),
                    bad_from=0.001,
                    help="0: none; up to 1: low priority is answered from memory; up to 2: normal too.",
                ),
            ),
        ),
        Row(
            "Doors",
            (
                Panel(title="Requests by door", queries=(rate("tailrace_requests_total", "door"),), unit="reqps"),
                Panel(
                    title="Median latency by door",
                    queries=(
                        Query(
                            f"histogram_quantile(0.5, sum by (door, le) (rate(tailrace_request_seconds_bucket[{RANGE}])))",
                            "{{door}}",
                        ),
                    ),
                    unit="s",
                ),
            ),
        ),
    ),
)
