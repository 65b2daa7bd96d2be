"""The decisions of docs/adr are dated and short, and their folder lists each page."""

import re
from pathlib import Path

from tests.support.pages import ROOT, anchors, links

ADR = ROOT / "docs/adr"
MOST_LINES = 15


def entries() -> dict[str, str]:
    """Map each decision, as a link from the top of the repository, to its text."""
    found = {}
    for page in sorted(ADR.glob("*.md")):
        if page.name != "README.md":
            title, *sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
            assert title.startswith("# "), page
            for section in sections:
                heading, _, text = section.partition("\n")
                (anchor,) = anchors(f"## {heading}")
                found[f"{Path('docs/adr') / page.name}#{anchor}"] = text.strip()
    return found


def test_every_decision_is_dated_and_short() -> None:
    """The first line begins with the day; what is longer than a screen's third belongs to the lab notes."""
    wrong = [
        place
        for place, text in entries().items()
        if not re.match(r"20\d\d-\d\d-\d\d[.,]", text) or len(text.splitlines()) > MOST_LINES
    ]

    assert wrong == []


def test_the_index_lists_every_page() -> None:
    """docs/adr/README.md leads to each area."""
    listed = set(links((ADR / "README.md").read_text()))

    assert {page.name for page in ADR.glob("*.md")} - {"README.md"} <= listed
