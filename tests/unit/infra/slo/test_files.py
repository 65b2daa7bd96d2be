"""Generated rules, dashboards and pages are fresh and query only series that exist."""

import json
from dataclasses import replace

import pytest
import yaml

from infra.slo.files import generated, with_table
from infra.slo.rules import selector
from services.errors import ErrorKind
from services.observability.objectives import Ratio, Selector, load_objectives
from services.settings.settings import Settings
from tests.support.pages import ROOT
from tests.support.promql import (
    DASHBOARDS,
    PROMETHEUS_OWN,
    all_rules,
    all_targets,
    bucket_borders,
    complaints,
    exported,
    recorded,
)

KNOWN = {**exported(), **recorded(), **PROMETHEUS_OWN}


def test_generated_files_are_fresh() -> None:
    """Every generated file is fresh, and none remains that is no longer generated."""
    made = generated(load_objectives(), ROOT)
    stale = [path for path, text in made.items() if (ROOT / path).read_text() != text]
    present = {*DASHBOARDS.glob("*"), *(ROOT / "infra/prometheus/tests").glob("objectives-*")}

    assert stale == [], "run `make slo`"
    assert present - {ROOT / path for path in made} == set()


def test_another_target_changes_rules_and_page() -> None:
    """A changed objective changes every file that derives from it."""
    promised = load_objectives()
    first, *rest = promised.objectives
    before = generated(promised, ROOT)

    after = generated(replace(promised, objectives=(replace(first, target=0.995), *rest)), ROOT)

    changed = {path for path in before if before[path] != after[path]}
    assert {
        "docs/slos.md",
        "infra/prometheus/rules/objectives.yaml",
        "infra/prometheus/tests/objectives-15s.yaml",
    } <= changed
    assert "infra/grafana/dashboards/objectives.json" in changed


def test_queries_name_series_that_exist() -> None:
    """Each metric and label in a rule or panel is exported, recorded, or Prometheus' own."""
    queries = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in all_rules()]
    queries += [(f"{board}: {title}", expr) for board, title, expr in all_targets()]

    assert len(queries) > 20
    assert {name: wrong for name, expr in queries if (wrong := complaints(expr, KNOWN))} == {}


def test_a_wrong_name_would_be_found() -> None:
    """The check finds unknown metrics, unknown labels, and groupings by absent labels."""
    expr = 'sum by (door, colour) (rate(tailrace_requests_total{shape="x"}[5m])) / tailrace_nothing'

    found = complaints(expr, KNOWN)

    assert found == [
        "tailrace_requests_total has no label shape",
        "nobody exports tailrace_nothing",
        "nothing below `by (colour)` has it",
    ]


def test_bounds_are_bucket_borders() -> None:
    """An objective's bound is a bucket border of its histogram, written in the same way."""
    borders = bucket_borders()
    bounds = [
        (term.selector.metric, *term.selector.match["le"])
        for one in load_objectives().objectives
        for term in one.sli.bad_terms
        if "le" in term.selector.match
    ]

    assert bounds
    assert [(metric, border) for metric, border in bounds if border not in borders[metric]] == []


def test_codes_of_failure_are_error_kinds() -> None:
    """Availability counts existing error kinds as bad."""
    availability = next(one.sli for one in load_objectives().objectives if one.name == "availability")

    assert isinstance(availability, Ratio)
    assert set(availability.bad.match["code"]) <= {kind.value for kind in ErrorKind}


def test_panels_have_unique_ids_and_the_board_s_source() -> None:
    """Each board selects its Prometheus by a variable; the provisioned one is the default."""
    source = yaml.safe_load((ROOT / "infra/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert [(one["type"], one["isDefault"]) for one in source["datasources"]] == [("prometheus", True)]

    for path in DASHBOARDS.glob("*.json"):
        board = json.loads(path.read_text())
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        variables = {one["name"]: (one["type"], one["query"]) for one in board["templating"]["list"]}
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert {panel["datasource"]["uid"] for panel in panels} == {f"${{{name}}}" for name in variables}
        assert set(variables.values()) == {("datasource", "prometheus")}


def test_alternatives_must_be_plain_words() -> None:
    """A label value that would act as a pattern is refused."""
    with pytest.raises(ValueError, match="pattern"):
        selector(Selector(metric="m", match={"code": ("a.*", "b+")}))


def test_a_page_without_marks_is_refused() -> None:
    """A page without the table's marks is an error, not a guess."""
    with pytest.raises(ValueError, match="make slo"):
        with_table("# Objectives\n", load_objectives())


def test_prometheus_scrapes_every_role_and_loads_the_rules() -> None:
    """Compose's scrape targets are the services' metrics ports, and the local file has the embedded stack's."""
    port = Settings.model_fields["metrics_port"].default
    jobs = {
        name: yaml.safe_load((ROOT / "infra/prometheus" / name).read_text()) for name in ("prometheus.yml", "local.yml")
    }

    targets = {name: job["scrape_configs"][0]["static_configs"][0]["targets"] for name, job in jobs.items()}
    roles = [f"{role}:{port}" for role in ("serve", "standby", "edge", "worker")]
    assert targets == {"prometheus.yml": roles, "local.yml": [f"localhost:{port}"]}
    for job in jobs.values():
        assert job["rule_files"] == ["rules/*.yaml"]
        assert job["scrape_configs"][0]["job_name"] == "tailrace"
