"""Every alert has a runbook page in the standard form. tests/e2e/test_docs.py runs the commands on it."""

import re

import pytest

from services.settings.settings import Settings
from tests.support.pages import ROOT, blocks, fences
from tests.support.promql import PROMETHEUS_OWN, all_rules, complaints, exported, recorded

RUNBOOKS = ROOT / "docs/runbooks"
ALERTS = sorted({rule["alert"] for rule in all_rules() if "alert" in rule})
SECTIONS = ["What it means", "Look", "Act"]
METRIC = re.compile(r"\b((?:tailrace_|vllm:|tailrace:)[a-zA-Z0-9_:]+)")
KNOWN = {**exported(), **recorded(), **PROMETHEUS_OWN}


def test_there_is_a_page_for_each_alert_and_for_nothing_else() -> None:
    """A page whose alert is gone misleads."""
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md") if path.stem != "README") == ALERTS


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_says_what_it_means_where_to_look_and_what_to_do(alert: str) -> None:
    """The sections are the same on each page, and looking is done by commands."""
    page = (RUNBOOKS / f"{alert}.md").read_text()

    assert page.startswith(f"# {alert}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == SECTIONS
    assert blocks(page), "no command to look with"


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_names_metrics_that_exist(alert: str) -> None:
    """Whatever looks like one of our metrics is one, or the name of a histogram."""
    page = (RUNBOOKS / f"{alert}.md").read_text()
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in KNOWN}

    assert [name for name in METRIC.findall(page) if name not in KNOWN and name not in families] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_s_queries_ask_for_what_is_there(alert: str) -> None:
    """Each page has a query to paste, of metrics and labels that exist."""
    queries = [fence.text for fence in fences((RUNBOOKS / f"{alert}.md").read_text()) if fence.language == "promql"]

    assert queries
    assert [said for query in queries for said in complaints(query, KNOWN)] == []


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_names_settings_that_exist(alert: str) -> None:
    """Who is told to change a setting finds it."""
    named = re.findall(r"\bTAILRACE_([A-Z_]+)", (RUNBOOKS / f"{alert}.md").read_text())

    assert [name for name in named if name.lower() not in Settings.model_fields] == []
