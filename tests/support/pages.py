"""Read the project's Markdown pages: fenced blocks, links and anchors. Does not interpret a block's content.

A ```sh block holds commands that a reader can paste; a ```text block directly after it is their output, where `...` is
any text. A word after `sh` says why a test cannot run the block: see MARKS.
"""

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKS = {
    "": "runs",
    "cluster": "needs a Kubernetes cluster",
    "docker": "needs Docker",
    "data": "needs the reader's own data",
    "bench": "measures for minutes, on idle cores",
    "guest": "needs a program that the project does not install",
}
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6}\s+(?P<words>.*?)\s*#*$")
_ID = re.compile(r"<a\s+(?:id|name)=\"(?P<id>[^\"]+)\"")


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block: its first line's number, its language, the rest of the fence line, and its text."""

    line: int
    language: str
    mark: str
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """Commands of a page, and the lines that they must print in this order; empty if the page shows no output."""

    line: int
    mark: str
    text: str
    expected: tuple[str, ...]


def all_pages(root: Path = ROOT) -> list[Path]:
    """List README, CONTRIBUTING, DECISIONS and everything below docs/."""
    papers = [root / name for name in ("README.md", "CONTRIBUTING.md", "DECISIONS.md")]
    return papers + sorted((root / "docs").rglob("*.md"))


def fences(page: str) -> list[Fence]:
    """Cut the fenced blocks out of a page's text. Raises ValueError for a fence that is never closed."""
    parsed, opened, lines = [], None, []
    for number, line in enumerate(page.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, lines = (number, fence), []
        elif opened is not None and fence and fence["ticks"] == opened[1]["ticks"] and not fence["info"].strip():
            language, _, mark = opened[1]["info"].strip().partition(" ")
            parsed.append(Fence(opened[0], language, mark.strip(), "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(opened[1]["indent"]))
    if opened is not None:
        raise ValueError(f"line {opened[0]}: the fence is never closed")
    return parsed


def blocks(page: str) -> list[Block]:
    """Return the page's ```sh blocks, each with the expected lines of the ```text block directly after it."""
    lines, parsed, all_fences = page.splitlines(), [], fences(page)
    for fence, following in zip_longest(all_fences, all_fences[1:]):
        if fence.language != "sh":
            continue
        expected: tuple[str, ...] = ()
        if following is not None and following.language == "text":
            end = fence.line + fence.text.count("\n") + 1
            if not "".join(lines[end : following.line - 1]).strip():
                expected = tuple(line.strip() for line in following.text.splitlines() if line.strip())
        parsed.append(Block(fence.line, fence.mark, fence.text, expected))
    return parsed


def missing_lines(expected: tuple[str, ...], output: str) -> list[str]:
    """Return the expected lines missing from the output, matched in order; `...` is any text."""
    start, missing = 0, []
    for line in expected:
        pattern = r"[^\n]*?".join(r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
        if set(line) == {"."}:
            continue
        if (match := re.compile(pattern).search(output, start)) is None:
            missing.append(line)
        else:
            start = match.end()
    return missing


def links(page: str) -> list[str]:
    """Return the targets of a page's links, except those in code."""
    prose = re.sub(r"`[^`\n]*`", "", _prose(page))
    return [link["target"] for link in _LINK.finditer(prose)]


def anchors(page: str) -> set[str]:
    """Return a page's link targets: headings as GitHub names them, and IDs."""
    names: set[str] = set()
    for line in _prose(page).splitlines():
        names.update(match["id"] for match in _ID.finditer(line))
        if heading := _HEADING.match(line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["words"]).lower()
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            names.add(slug if slug not in names else _numbered(slug, names))
    return names


def _numbered(slug: str, names: set[str]) -> str:
    return next(name for name in (f"{slug}-{number}" for number in range(1, 1_000)) if name not in names)


def _prose(page: str) -> str:
    lines = page.splitlines()
    for fence in fences(page):
        height = fence.text.count("\n") + 1
        lines[fence.line - 1 : fence.line + height] = [""] * (height + 1)
    return "\n".join(lines)
