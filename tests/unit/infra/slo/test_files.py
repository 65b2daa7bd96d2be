"""Generated rules, dashboards and pages are current and query only existing series."""

import re
from collections import defaultdict

from infra.slo.files import generated
from services.observability.objectives import load_objectives
from tests.support.pages import ROOT
from tests.support.promql import (
    PROMETHEUS_OWN,
    all_rules,
    all_targets,
    bucket_borders,
    complaints,
    exported,
    mixes_environments,
    recorded,
    selectors,
)

KNOWN = {**exported(), **recorded(), **PROMETHEUS_OWN}


def test_generated_files_are_fresh() -> None:
    """Every generated file is current, and no obsolete generated file remains."""
    made = generated(load_objectives(), ROOT)
    stale = [path for path, text in made.items() if (ROOT / path).read_text() != text]
    present = {*(ROOT / "infra/prometheus/tests").glob("objectives-*")}

    assert stale == [], "run `make slo`"
    assert present - {ROOT / path for path in made} == set()


def test_queries_name_series_that_exist() -> None:
    """Each metric and label in a rule or panel is exported, recorded, or built into Prometheus."""
    queries = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in all_rules()]
    queries += [(f"{board}: {title}", expr) for board, title, expr in all_targets()]

    assert len(queries) > 20
    assert {name: wrong for name, expr in queries if (wrong := complaints(expr, KNOWN))} == {}


def test_each_environment_has_its_own_rules_and_panels() -> None:
    """Rules do not aggregate series of several environments, and each panel filters by the selected environment."""
    assert [wrong for rule in all_rules() for wrong in mixes_environments(rule["expr"])] == []
    for board, title, expr in all_targets():
        assert {labels.get("namespace") for _, labels in selectors(expr)} == {".*"}, f"{board}: {title}"


def test_every_metric_is_used() -> None:
    """Each exported metric is used by an alert, an objective, a panel or a page."""
    pages = " ".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    queries = [rule["expr"] for rule in all_rules()] + [expr for _, _, expr in all_targets()]
    used = {name for expr in queries for name, _ in selectors(expr)}
    families: dict[str, set[str]] = defaultdict(set)
    for name in exported():
        families[re.sub(r"_(bucket|count|sum)$", "", name)].add(name)

    assert [
        family for family, names in families.items() if not names & used and not re.search(rf"\b{family}\b", pages)
    ] == []


def test_bounds_are_bucket_borders() -> None:
    """An objective's bound is a bucket border of its histogram, written identically."""
    borders = bucket_borders()
    bounds = [
        (term.selector.metric, *term.selector.match["le"])
        for objective in load_objectives().objectives
        for term in objective.sli.bad_terms
        if "le" in term.selector.match
    ]

    assert bounds
    assert [(metric, border) for metric, border in bounds if border not in borders[metric]] == []
