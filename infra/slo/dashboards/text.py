"""The dashboard of text generation: requests by outcome, time to first token, gaps between tokens. Empty without text."""

from infra.slo.dashboards.board import Board, Panel, Query, Row, quantile, rate, share

BOARD = Board(
    name="text",
    title="text",
    help="The OpenAI door: requests, refusals, time to first token, tokens. The engine's metrics are on the dashboard engine.",
    rows=(
        Row(
            "Requests",
            (
                Panel(
                    title="Text requests by outcome",
                    queries=(rate("tailrace_text_requests_total", "route, code"),),
                    unit="reqps",
                    kind="areas",
                ),
                Panel(
                    title="Refused for lack of capacity",
                    queries=(share("tailrace_text_requests_total", 'code="overloaded"', by="route"),),
                    unit="percentunit",
                    help="Text is shed first: before high-priority requests, and before recommendations under load.",
                ),
                Panel(
                    title="Failed on our side",
                    queries=(
                        share(
                            "tailrace_text_requests_total",
                            'code=~"internal|dependency_away|deadline_exceeded"',
                            by="route",
                        ),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Circuit breaker of the text server",
                    queries=(Query("max(tailrace_text_breaker_open)", "open"),),
                    bad_from=1,
                    help="1 while a gateway's circuit breaker for the text server is open after repeated failures.",
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    title="Time to first token",
                    queries=(
                        quantile(0.5, "tailrace_text_first_token_seconds", "route"),
                        quantile(0.99, "tailrace_text_first_token_seconds", "route"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Time between tokens",
                    queries=(
                        quantile(0.5, "tailrace_text_token_gap_seconds", "route"),
                        quantile(0.99, "tailrace_text_token_gap_seconds", "route"),
                    ),
                    unit="s",
                ),
                Panel(title="Text tokens", queries=(rate("tailrace_text_tokens_total", "kind"),)),
                Panel(title="Choices being generated", queries=(Query("sum(tailrace_text_in_flight)", "choices"),)),
            ),
        ),
        Row(
            "Rationales",
            (
                Panel(
                    title="Rationales by outcome",
                    queries=(rate("tailrace_rationales_total", "outcome"),),
                    unit="reqps",
                    kind="areas",
                    help="One sentence per recommendation that requested a rationale.",
                ),
            ),
        ),
    ),
)
