"""Generated rules, dashboards and pages are fresh and query only series that exist."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from infra.slo import __main__ as slo
from infra.slo.files import generated, with_table
from infra.slo.rules import selector
from services.observability.objectives import Ratio, Selector, load_objectives
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


def test_nothing_has_drifted() -> None:
    """Every generated file is what the objectives give now."""
    stale = [path for path, text in generated(load_objectives(), ROOT).items() if (ROOT / path).read_text() != text]

    assert stale == [], "run `make slo`"


def test_nothing_is_left_over() -> None:
    """Dashboards and alert tests that are no longer made are gone."""
    made = {ROOT / path for path in generated(load_objectives(), ROOT)}
    there = {*DASHBOARDS.glob("*"), *(ROOT / "infra/prometheus/tests").glob("objectives-*")}

    assert there - made == set()


def test_checking_writes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m infra.slo --check` agrees with the committed files and says nothing."""
    monkeypatch.setattr("sys.argv", ["slo", "--check"])

    assert slo.main() == 0
    assert capsys.readouterr().out == ""


def test_another_target_changes_rules_and_page() -> None:
    """A changed objective is seen in everything that follows from it."""
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


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.get("record") or rule["alert"])
def test_rules_ask_for_what_is_there(rule: dict[str, str]) -> None:
    """Each metric and label in a rule is one that our processes export, a rule records, or Prometheus has of itself."""
    assert complaints(rule["expr"], KNOWN) == []


@pytest.mark.parametrize(("board", "title", "expr"), all_targets())
def test_panels_ask_for_what_is_there(board: str, title: str, expr: str) -> None:
    """The same for every query of every panel."""
    assert complaints(expr, KNOWN) == [], f"{board}: {title}"


def test_a_wrong_name_would_be_found() -> None:
    """The check itself sees unknown metrics, unknown labels, and groupings by labels that are not there."""
    expr = 'sum by (door, colour) (rate(tailrace_requests_total{shape="x"}[5m])) / tailrace_nothing'

    said = complaints(expr, KNOWN)

    assert said == [
        "tailrace_requests_total has no label shape",
        "nobody exports tailrace_nothing",
        "nothing below `by (colour)` has it",
    ]


def test_bounds_are_bucket_borders() -> None:
    """An objective's border is one of its histogram's, written in the same way."""
    borders = bucket_borders()
    asked = [
        (term.selector.metric, *term.selector.match["le"])
        for one in load_objectives().objectives
        for term in one.sli.bad_terms
        if "le" in term.selector.match
    ]

    assert asked
    assert [(metric, border) for metric, border in asked if border not in borders[metric]] == []


def test_codes_of_failure_are_codes_that_doors_give() -> None:
    """What availability counts as bad are error kinds, all on our side."""
    from services.errors import ErrorKind

    availability = next(one.sli for one in load_objectives().objectives if one.name == "availability")

    assert isinstance(availability, Ratio)
    assert set(availability.bad.match["code"]) <= {kind.value for kind in ErrorKind}


def test_every_page_of_an_alert_is_linked() -> None:
    """Each alert links to <runbooks>/<its name>.md and has a severity."""
    for rule in (rule for rule in all_rules() if "alert" in rule):
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
        assert rule["labels"]["severity"] in {"page", "ticket"}


def test_no_two_panels_share_an_id_and_all_use_the_chosen_source() -> None:
    """Each board asks for a Prometheus, whatever it is called in this Grafana; the provisioned one is the default."""
    import json

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
    """A value that would act as a pattern is refused instead of matching something else."""
    with pytest.raises(ValueError, match="pattern"):
        selector(Selector(metric="m", match={"code": ("a.*", "b+")}))


def test_a_page_without_marks_is_refused() -> None:
    """The table never lands at a guessed place."""
    with pytest.raises(ValueError, match="make slo"):
        with_table("# Objectives\n", load_objectives())


def test_prometheus_scrapes_every_role_and_loads_the_rules() -> None:
    """Compose's scrape targets are the services' metrics ports, and the local file has the embedded stack's."""
    from services.settings.settings import Settings

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
        assert Path(ROOT / "infra/prometheus/rules").is_dir()
