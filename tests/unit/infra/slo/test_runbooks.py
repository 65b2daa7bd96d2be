"""Every alert has a runbook page in the standard form. tests/e2e/test_docs.py runs its commands."""

import re

import pytest

from services.settings.settings import Settings
from tests.support.pages import ROOT, blocks, fences
from tests.support.promql import PROMETHEUS_OWN, all_rules, complaints, exported, recorded

RUNBOOKS = ROOT / "docs/runbooks"
ALERTS = sorted({rule["alert"] for rule in all_rules() if "alert" in rule})
SECTIONS = ["What it means", "Look", "Act"]
EVENT = re.compile(r"\bstream\.[a-z_]+")
LOGGED = {
    name
    for file in (ROOT / "services/stream").rglob("*.py")
    for name in re.findall(rf'"({EVENT.pattern})"', file.read_text())
}
METRIC = re.compile(r"(?<!HGETALL )\b((?:tailrace_|vllm:|tailrace:)[a-zA-Z0-9_:]+)")
KNOWN = {**exported(), **recorded(), **PROMETHEUS_OWN}


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_has_its_sections_commands_queries_and_existing_names(alert: str) -> None:
    """Each page has the standard sections, a command and a query, and all names on it exist."""
    page = (RUNBOOKS / f"{alert}.md").read_text()
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in KNOWN}
    queries = [fence.text for fence in fences(page) if fence.language == "promql"]
    settings = re.findall(r"\bTAILRACE_([A-Z_]+)", page)

    assert page.startswith(f"# {alert}\n")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == SECTIONS
    assert blocks(page), "no command to run"
    assert queries
    assert [wrong for query in queries for wrong in complaints(query, KNOWN)] == []
    assert [name for name in METRIC.findall(page) if name not in KNOWN and name not in families] == []
    assert set(EVENT.findall(page)) <= LOGGED
    assert [name for name in settings if name.lower() not in Settings.model_fields] == []


def test_every_alert_links_to_its_page() -> None:
    """Each alert has a severity and a link to its runbook, and each runbook has an alert."""
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md") if path.stem != "README") == ALERTS
    for rule in (rule for rule in all_rules() if "alert" in rule):
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"
        assert rule["labels"]["severity"] in {"page", "ticket"}
