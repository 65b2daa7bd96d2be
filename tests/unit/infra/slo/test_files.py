"""Generated rules, dashboards and pages are fresh and query only series that exist."""

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
    recorded,
)

KNOWN = {**exported(), **recorded(), **PROMETHEUS_OWN}


def test_generated_files_are_fresh() -> None:
    """Every generated file is fresh, and none remains that is no longer generated."""
    made = generated(load_objectives(), ROOT)
    stale = [path for path, text in made.items() if (ROOT / path).read_text() != text]
    present = {*(ROOT / "infra/prometheus/tests").glob("objectives-*")}

    assert stale == [], "run `make slo`"
    assert present - {ROOT / path for path in made} == set()


def test_queries_name_series_that_exist() -> None:
    """Each metric and label in a rule or panel is exported, recorded, or Prometheus' own."""
    queries = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in all_rules()]
    queries += [(f"{board}: {title}", expr) for board, title, expr in all_targets()]

    assert len(queries) > 20
    assert {name: wrong for name, expr in queries if (wrong := complaints(expr, KNOWN))} == {}


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
