"""The dashboard of text as its callers see it: what is asked for and how it ends, first tokens, gaps, places. Empty without text."""

from infra.slo.dashboards.board import Board, Panel, Query, Row
from infra.slo.dashboards.queries import quantile, rate, share

BOARD = Board(
    name="text",
    title="text",
    says="The OpenAI door: requests, refusals, first tokens, tokens. The engine's side is on the dashboard engine.",
    rows=(
        Row(
            "Requests",
            (
                Panel(
                    title="Texts by how they ended",
                    queries=(rate("tailrace_text_requests_total", "route, code"),),
                    unit="reqps",
                    kind="areas",
                ),
                Panel(
                    title="Refused for want of places",
                    queries=(share("tailrace_text_requests_total", 'code="overloaded"', by="route"),),
                    unit="percentunit",
                    says="Text gives way first: to high priority, and to recommendations where a gateway is strained.",
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
                    title="Breaker of the text writer",
                    queries=(Query("max(tailrace_text_breaker_open)", "open"),),
                    bad_from=1,
                    says="1 while a gateway does not ask the text writer, because it failed several times in a row.",
                ),
            ),
        ),
        Row(
            "Speed at the door",
            (
                Panel(
                    title="First token",
                    queries=(
                        quantile(0.5, "tailrace_text_first_token_seconds", "route"),
                        quantile(0.99, "tailrace_text_first_token_seconds", "route"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Between tokens",
                    queries=(
                        quantile(0.5, "tailrace_text_token_gap_seconds", "route"),
                        quantile(0.99, "tailrace_text_token_gap_seconds", "route"),
                    ),
                    unit="s",
                ),
                Panel(title="Tokens of texts", queries=(rate("tailrace_text_tokens_total", "kind"),)),
                Panel(title="Choices being written", queries=(Query("sum(tailrace_text_in_flight)", "choices"),)),
            ),
        ),
        Row(
            "Sentences with recommendations",
            (
                Panel(
                    title="Sentences asked for",
                    queries=(rate("tailrace_rationales_total", "outcome"),),
                    unit="reqps",
                    kind="areas",
                    says="How writing the rationales ended, by outcome.",
                ),
            ),
        ),
    ),
)
