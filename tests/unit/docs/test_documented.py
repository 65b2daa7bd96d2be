"""Every command on every page exists, and every link leads somewhere."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from services.settings.settings import Settings
from tests.support.documented import complaints
from tests.support.pages import MARKS, ROOT, all_pages, anchors, blocks, fences, links
from tests.support.shell_words import Command, commands

OTHER_SHELLS = {"bash", "shell", "console", "zsh", "shell-session"}
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in all_pages()}


def test_every_block_of_commands_is_fenced_as_one() -> None:
    """Commands stand in ```sh fences, with a known reason where no test can run them."""
    wrong = [
        f"{name}:{fence.line}: ```{fence.language} {fence.mark}"
        for name, text in TEXTS.items()
        for fence in fences(text)
        if fence.language in OTHER_SHELLS or (fence.language == "sh" and fence.mark not in MARKS)
    ]

    assert wrong == [], f"write ```sh, or ```sh with one of {', '.join(filter(None, MARKS))}"


def test_every_command_exists() -> None:
    """Programs, subcommands, options, modules and files that a page names exist, whether a test runs them or not."""
    wrong = [
        f"{name}:{block.line}: {complaint} in `{command.source.strip()}`"
        for name, text in TEXTS.items()
        for block in blocks(text)
        for command in commands(block.text)
        for complaint in complaints(command)
    ]

    assert wrong == []


def test_every_link_leads_somewhere() -> None:
    """Files exist, and so do the headings that anchors name."""
    broken = []
    for name, text in TEXTS.items():
        for target in links(text):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            found = (ROOT / Path(name).parent / unquote(path)).resolve() if path else ROOT / name
            if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found.read_text())):
                broken.append(f"{name}: {target}")

    assert broken == []


def test_every_setting_exists() -> None:
    """A setting that a page names is one of the settings."""
    named = {name for text in TEXTS.values() for name in re.findall(r"\bTAILRACE_([A-Z][A-Z_]*[A-Z])\b", text)}

    assert sorted(named - {name.upper() for name in Settings.model_fields}) == []


def test_every_page_is_in_the_index() -> None:
    """docs/README.md leads to each page, or to its folder."""
    docs = ROOT / "docs"
    listed = {(docs / target.partition("#")[0]).resolve() for target in links(TEXTS["docs/README.md"])}
    pages = [ROOT / name for name in TEXTS if name.startswith("docs/") and name != "docs/README.md"]

    assert [page.name for page in pages if page not in listed and page.parent not in listed - {docs}] == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("tailrace pipeline --events x.csv --items=y.csv", None),
        ("tailrace pipeline --event x.csv", "tailrace pipeline has no --event"),
        ("python -m benchmarks.nothing", "no module benchmarks.nothing"),
        ("kubectl -n recs get pods", None),
        ("frobnicate", "unknown program frobnicate"),
        ("cat services/no-such-file.py", "no file services/no-such-file.py"),
    ],
)
def test_a_command_that_does_not_exist_is_reported(words: str, complaint: str | None) -> None:
    """By the program's name, or by the file's."""
    assert complaints(Command(tuple(words.split()), words)) == ([complaint] if complaint else [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# a comment\nA=1 B='2 3' tailrace status    # why\n", [("tailrace", "status")]),
        ("a x | b y && c; d &\n", [("a", "x"), ("b", "y"), ("c",), ("d",)]),
        ("curl -s \\\n  localhost\n", [("curl", "-s", "localhost")]),
        ("a > out 2>&1 < in\n", [("a",)]),
        ("cat > f <<'EOF'\nnot a 'command\nEOF\nb\n", [("cat",), ("b",)]),
        ("for x in 1 2; do a $x; done\n", [("a", "$x")]),
    ],
)
def test_commands_of_shell_text(text: str, words: list[tuple[str, ...]]) -> None:
    """Programs and their arguments, without comments, assignments, redirections and keywords."""
    assert [command.words for command in commands(text)] == words
