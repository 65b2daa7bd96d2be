"""Every command on every page exists, and every link resolves."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from benchmarks.pages.__main__ import WIDTH
from services.gateway.events.record import check_events
from services.gateway.rest.schema import parse_events, parse_recommend
from services.settings.settings import Settings
from tests.support.documented import complaints
from tests.support.pages import MARKS, ROOT, all_pages, anchors, blocks, fences, links

OTHER_SHELLS = {"bash", "shell", "console", "zsh", "shell-session"}
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in all_pages()}


def test_every_block_of_commands_is_fenced_as_one() -> None:
    """Commands are in ```sh fences, marked with a known reason if no test can run them."""
    wrong = [
        f"{name}:{fence.line}: ```{fence.language} {fence.mark}"
        for name, text in TEXTS.items()
        for fence in fences(text)
        if fence.language in OTHER_SHELLS or (fence.language == "sh" and fence.mark not in MARKS)
    ]

    assert wrong == [], f"write ```sh, or ```sh with one of {', '.join(filter(None, MARKS))}"


def test_every_command_exists() -> None:
    """Subcommands, options, targets, modules and files in code blocks and between backticks exist."""
    wrong = [
        f"{name}: {command}: {complaint}"
        for name, text in TEXTS.items()
        for command in (*(block.text for block in blocks(text)), *re.findall(r"`(tailrace [^`]+)`", text))
        for complaint in complaints(command)
    ]

    assert wrong == []


def test_the_bodies_of_the_first_steps_are_accepted() -> None:
    """Each JSON body between backticks in docs/how-do-i.md is accepted by its route."""
    bodies = [code.encode() for code in re.findall(r"`(\{[^`]+\})`", TEXTS["docs/how-do-i.md"])]
    events = [body for body in bodies if b'item_id"' in body and b"event_type" in body]
    recommendations = [body for body in bodies if body not in events]

    assert [check_events(parse_events(body, 1), max_events=1, now_ms=10**12) for body in events]
    assert [parse_recommend(body, "r", None) for body in recommendations]


def test_every_link_leads_somewhere() -> None:
    """Link targets exist, both files and the headings that anchors name."""
    broken = []
    for name, text in TEXTS.items():
        for target in links(text):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            linked = (ROOT / Path(name).parent / unquote(path)).resolve() if path else ROOT / name
            if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked.read_text())):
                broken.append(f"{name}: {target}")

    assert broken == []


def test_prose_is_as_wide_as_code() -> None:
    """A changed word changes a line, not a paragraph; only tables and code are wider."""
    wide = [
        f"{name}: {line:.60}"
        for name, text in TEXTS.items()
        for line in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
        if len(line) > WIDTH and " " in line and not line.startswith(("|", "<!--"))
    ]

    assert wide == [], f"wrap it at {WIDTH} characters"


def test_every_setting_exists() -> None:
    """Every setting that a page names exists."""
    named = {name for text in TEXTS.values() for name in re.findall(r"\bTAILRACE_([A-Z][A-Z_]*[A-Z])\b", text)}

    assert sorted(named - {name.upper() for name in Settings.model_fields}) == []


@pytest.mark.parametrize("index", ["docs/README.md", "docs/adr/README.md"])
def test_every_page_is_in_the_index(index: str) -> None:
    """The folder's README links to each page below it, or to the page's folder."""
    folder = (ROOT / index).parent
    listed = {(folder / target.partition("#")[0]).resolve() for target in links(TEXTS[index])} - {folder}
    pages = [ROOT / name for name in TEXTS if name != index and (ROOT / name).is_relative_to(folder)]

    assert [page.name for page in pages if page not in listed and page.parent not in listed] == []
