"""The dashboard of the event flow: events accepted, the worker's lag, dead letters."""

from infra.slo.dashboards.board import Board, Panel, Query, Row, quantile, rate

BOARD = Board(
    name="stream",
    title="stream",
    help="Events from the doors to the features, and impressions sent.",
    rows=(
        Row(
            "In",
            (
                Panel(title="Events at the doors", queries=(rate("tailrace_events_total", "door, code"),), unit="ops"),
                Panel(title="Events applied", queries=(rate("tailrace_stream_applied_total"),), unit="ops"),
                Panel(
                    title="Lag by partition",
                    queries=(Query("max by (partition) (tailrace_stream_lag_events)", "partition {{partition}}"),),
                    bad_from=1_000,
                ),
                Panel(
                    title="Standing still, by partition",
                    queries=(
                        Query(
                            "time() - max by (partition) (tailrace_stream_progress_time_seconds)",
                            "partition {{partition}}",
                        ),
                    ),
                    unit="s",
                    bad_from=120,
                    help="Since the partition last went on, or was seen with nothing left.",
                ),
            ),
        ),
        Row(
            "Fresh",
            (
                Panel(
                    title="Accepted until visible",
                    queries=tuple(quantile(q, "tailrace_event_to_visible_seconds") for q in (0.5, 0.9, 0.99)),
                    unit="s",
                    bad_from=0.25,
                ),
                Panel(
                    title="Skipped, by reason",
                    queries=(rate("tailrace_stream_skipped_total", "reason"),),
                    unit="ops",
                    help="Redelivered and already applied, or older than the history.",
                ),
                Panel(
                    title="Dead letters",
                    queries=(Query("sum(increase(tailrace_stream_dead_lettered_total[15m]))", "in 15 minutes"),),
                    bad_from=1,
                ),
                Panel(
                    title="Offline log",
                    queries=(
                        Query("sum by (step) (increase(tailrace_stream_log_failures_total[15m]))", "{{step}} failed"),
                        Query("max(tailrace_stream_log_unreadable_files)", "unreadable files"),
                    ),
                    bad_from=1,
                    help="Failures in 15 minutes, by step, and files that are left out.",
                ),
            ),
        ),
        Row(
            "Out",
            (
                Panel(
                    title="Impressions by outcome",
                    queries=(rate("tailrace_impressions_total", "outcome"),),
                    unit="ops",
                    kind="areas",
                ),
                Panel(
                    title="Worker starts",
                    queries=(
                        Query('sum(changes(tailrace_process_start_time_seconds{part="worker"}[15m]))', "in 15 minutes"),
                    ),
                    bad_from=3,
                ),
            ),
        ),
    ),
)
