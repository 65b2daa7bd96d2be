"""The capacity dashboard: load, distance to the limits, shedding."""

from infra.slo.dashboards.board import RANGE, Board, Panel, Query, Row, rate
from infra.slo.operations import JOB

BOARD = Board(
    name="capacity",
    title="capacity",
    help="Load against limits. docs/capacity.md has the capacity of one replica.",
    rows=(
        Row(
            "Load",
            (
                Panel(title="Recommendations", queries=(rate("tailrace_requests_total"),), unit="reqps"),
                Panel(title="Events", queries=(rate("tailrace_events_total"),), unit="ops"),
                Panel(
                    title="Refused for lack of capacity",
                    queries=(rate("tailrace_requests_total", "code", 'code=~"overloaded|quota_exceeded"'),),
                    unit="reqps",
                    bad_from=0.001,
                ),
            ),
        ),
        Row(
            "Distance to the limits",
            (
                Panel(
                    title="Concurrent requests in an engine, mean",
                    queries=(
                        Query(
                            f'sum (rate(vllm:e2e_request_latency_seconds_sum{{model_name="ranker"}}[{RANGE}])) / sum (tailrace_llm_replicas)',
                            "per replica",
                        ),
                    ),
                    help="Little's law: arrivals times time in the engine.",
                ),
                Panel(
                    title="Answers without the LLM because of load",
                    queries=(
                        Query(
                            f'sum by (reason) (rate(tailrace_requests_total{{reason=~"llm_overloaded|llm_too_slow|llm_late|shed"}}[{RANGE}]))'
                            f" / on () group_left () sum (rate(tailrace_requests_total[{RANGE}]))",
                            "{{reason}}",
                        ),
                    ),
                    unit="percentunit",
                    kind="areas",
                ),
                Panel(
                    title="Strain and KV blocks",
                    queries=(
                        Query("max(tailrace_admission_strain)", "strain"),
                        Query("max(vllm:kv_cache_usage_perc)", "KV blocks held"),
                    ),
                ),
            ),
        ),
        Row(
            "Parts",
            (
                Panel(title="Targets up", queries=(Query(f'sum(up{{job=~"{JOB}"}})', "up"),), kind="stat"),
                Panel(
                    title="Starts in 15 minutes",
                    queries=(Query("sum by (part) (changes(tailrace_process_start_time_seconds[15m]))", "{{part}}"),),
                    bad_from=3,
                ),
                Panel(
                    title="Uptime",
                    queries=(Query("time() - max by (part) (tailrace_process_start_time_seconds)", "{{part}}"),),
                    unit="s",
                    kind="stat",
                ),
                Panel(
                    title="Series scraped",
                    queries=(Query(f'sum(scrape_samples_scraped{{job=~"{JOB}"}})', "samples"),),
                    help="Label cardinality is low by design; a rise without a new bundle is a fault.",
                ),
            ),
        ),
    ),
)
