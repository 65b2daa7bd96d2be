"""Every command on every page is one that exists, and every link leads somewhere: `pytest tests/unit/docs`."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.documented import complaints, reason_to_skip, runnable
from tests.support.pages import MARKS, ROOT, all_pages, anchors, blocks, fences, links
from tests.support.shell_words import Command, commands

OTHER_SHELLS = {"bash", "shell", "console", "zsh", "shell-session"}


def page_name(page: Path) -> str:
    """Name a page as a reader would."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_block_of_commands_is_fenced_as_one(page: Path) -> None:
    """Commands stand in ```sh fences, with a known reason where no test can run them."""
    wrong = [
        f"{page_name(page)}:{fence.line}: ```{fence.language} {fence.mark}"
        for fence in fences(page.read_text())
        if fence.language in OTHER_SHELLS or (fence.language == "sh" and fence.mark not in MARKS)
    ]

    assert wrong == [], f"write ```sh, or ```sh with one of {', '.join(filter(None, MARKS))}"


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_command_exists(page: Path) -> None:
    """Programs, subcommands, options, modules and files that a page names are there, whether a test runs them or not."""
    wrong = [
        f"{page_name(page)}:{block.line}: {complaint} in `{command.source.strip()}`"
        for block in blocks(page.read_text())
        for command in commands(block.text)
        for complaint in complaints(command)
    ]

    assert wrong == []


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files exist, and so do the headings that anchors name."""
    broken = []
    for target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = (page.parent / unquote(path)).resolve() if path else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found.read_text())):
            broken.append(target)

    assert broken == [], f"in {page_name(page)}"


def test_every_page_is_in_the_index() -> None:
    """A page that docs/README.md does not lead to is not found."""
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target.partition("#")[0]).resolve() for target in links(index.read_text())}
    pages = [page for page in all_pages() if index.parent in page.parents and page != index]

    lost = [page_name(page) for page in pages if page not in listed and page.parent not in listed]

    assert lost == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("tailrace status", None),
        ("tailrace stats", "tailrace has no stats"),
        ("tailrace pipeline --events x.csv --items=y.csv", None),
        ("tailrace pipeline --event x.csv", "tailrace pipeline has no --event"),
        ("make up", None),
        ("make upp", "no make target upp"),
        ("python -m benchmarks.serve --json OUT", None),
        ("python -m benchmarks.nothing", "no module benchmarks.nothing"),
        ("kubectl -n recs get pods", None),
        ("kubectl gte pods", "kubectl has no gte"),
        ("docker compose up", None),
        ("docker compse up", "docker has no compse"),
        ("frobnicate", "unknown program frobnicate"),
        ("cat infra/local/commands/up.py", None),
        ("cat infra/local/down-and-up.py", "no file infra/local/down-and-up.py"),
    ],
)
def test_what_is_not_there_is_told(words: str, complaint: str | None) -> None:
    """By the program's name, or by the file's."""
    assert complaints(Command(tuple(words.split()), words)) == ([complaint] if complaint else [])


def test_lines_that_a_test_cannot_run_are_left_out_with_a_reason() -> None:
    """The others run as they stand."""
    block = "TAILRACE_HTTP_PORT=1 tailrace up -d\necho a \\\n  b\nmake test # all\n"

    shared = runnable(block)

    assert shared.script == "echo a \\\n  b\n"
    assert [line for line, _ in shared.left_out] == ["TAILRACE_HTTP_PORT=1 tailrace up -d", "make test # all"]
    assert reason_to_skip(Command(("tailrace", "status"), "")) is None
