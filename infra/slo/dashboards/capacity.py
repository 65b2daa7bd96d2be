"""The dashboard to plan by: how much is asked, how near each part is to its limit, what gives way."""

from infra.slo.dashboards.board import RANGE, Board, Panel, Query, Row
from infra.slo.dashboards.queries import rate
from infra.slo.operations import JOB

BOARD = Board(
    name="capacity",
    title="capacity",
    says="Load against limits. docs/capacity.md says what one replica carries.",
    rows=(
        Row(
            "Asked",
            (
                Panel(title="Recommendations", queries=(rate("tailrace_requests_total"),), unit="reqps"),
                Panel(title="Events", queries=(rate("tailrace_events_total"),), unit="ops"),
                Panel(
                    title="Refused for want of room",
                    queries=(rate("tailrace_requests_total", "code", 'code=~"overloaded|quota_exceeded"'),),
                    unit="reqps",
                    bad_from=0.001,
                ),
            ),
        ),
        Row(
            "Near the limit",
            (
                Panel(
                    title="Requests in an engine at once, mean",
                    queries=(
                        Query(
                            f'sum (rate(vllm:e2e_request_latency_seconds_sum{{model_name="ranker"}}[{RANGE}])) / sum (tailrace_llm_replicas)',
                            "per replica",
                        ),
                    ),
                    says="Little's law: arrivals times time in the engine.",
                ),
                Panel(
                    title="Answers that the LLM was too busy for",
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
                Panel(title="Targets that answer", queries=(Query(f'sum(up{{job=~"{JOB}"}})', "up"),), kind="stat"),
                Panel(
                    title="Starts in 15 minutes",
                    queries=(Query("sum by (part) (changes(tailrace_process_start_time_seconds[15m]))", "{{part}}"),),
                    bad_from=3,
                ),
                Panel(
                    title="Up since",
                    queries=(Query("time() - max by (part) (tailrace_process_start_time_seconds)", "{{part}}"),),
                    unit="s",
                    kind="stat",
                ),
                Panel(
                    title="Series scraped",
                    queries=(Query(f'sum(scrape_samples_scraped{{job=~"{JOB}"}})', "samples"),),
                    says="Labels are few on purpose; a rise without a new bundle is a mistake.",
                ),
            ),
        ),
    ),
)
