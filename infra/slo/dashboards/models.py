"""The dashboard of bundles: versions serving, offline quality, and quality while serving, by version.

While an upgrade rolls both versions answer, so every panel by version is the canary's comparison.
"""

from infra.slo.dashboards.board import RANGE, Board, Panel, Query, Row, mean, quantile, rate, share

_CLICKS, _ANSWERS = "tailrace_attributed_events_total", "tailrace_answers_total"


def _clicks_per_answer(by: str, legend: str) -> Query:
    clicks, answers = (f"sum by ({by}) (rate({metric}[{RANGE}]))" for metric in (_CLICKS, _ANSWERS))
    return Query(f"{clicks} / {answers}", legend)


BOARD = Board(
    name="models",
    title="models",
    help="Bundles: versions serving, offline quality, and quality while serving, by version and tier.",
    rows=(
        Row(
            "Bundle",
            (
                Panel(
                    title="Serving",
                    queries=(Query("max by (version) (tailrace_bundle_info == 1)", "{{version}}"),),
                    kind="stat",
                ),
                Panel(
                    title="Offline quality (leave one out)",
                    queries=(
                        Query(
                            "max by (version, model, metric) (tailrace_bundle_quality)"
                            " * on (version) group_left () max by (version) (tailrace_bundle_info == 1)",
                            "{{model}} {{metric}}",
                        ),
                    ),
                    kind="bars",
                    help="From the evaluation in the bundle, for all versions that serve now.",
                ),
                Panel(
                    title="Software",
                    queries=(
                        Query(
                            "max by (part, version, python) (tailrace_build_info)",
                            "{{part}} {{version}}, Python {{python}}",
                        ),
                    ),
                    kind="stat",
                ),
            ),
        ),
        Row(
            "Version beside version",
            (
                Panel(
                    title="Answers by bundle",
                    queries=(rate(_ANSWERS, "bundle_version"),),
                    unit="reqps",
                    kind="areas",
                ),
                Panel(
                    title="Clicks per answer by bundle",
                    queries=(_clicks_per_answer("bundle_version", "{{bundle_version}}"),),
                    unit="percentunit",
                    help="Only clicks that carry their request_id and reach the gateway that answered it are counted.",
                ),
                Panel(
                    title="Answers by tier and bundle",
                    queries=(rate(_ANSWERS, "bundle_version, tier"),),
                    unit="reqps",
                ),
            ),
        ),
        Row(
            "Quality by tier",
            (
                Panel(
                    title="Clicks per answer by tier",
                    queries=(_clicks_per_answer("tier", "{{tier}}"),),
                    unit="percentunit",
                ),
                Panel(
                    title="Agreement of student and LLM on the top k",
                    queries=(
                        mean("tailrace_student_agreement_ratio"),
                        quantile(0.1, "tailrace_student_agreement_ratio"),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    title="Student failures",
                    queries=(share("tailrace_requests_total", 'reason="student_failed"'),),
                    unit="percentunit",
                    bad_from=0.001,
                ),
            ),
        ),
        Row(
            "Stored lists",
            (
                Panel(
                    title="Age of lists found",
                    queries=(
                        quantile(0.5, "tailrace_precomputed_age_seconds"),
                        quantile(0.99, "tailrace_precomputed_age_seconds"),
                    ),
                    unit="s",
                ),
            ),
        ),
    ),
)
