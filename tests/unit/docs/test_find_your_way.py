"""Every step of docs/find-your-way.md names a file that exists and a symbol defined in it."""

import ast
import re
from functools import cache

from tests.support.pages import ROOT

QUESTIONS = "abcdefghijklmnopqrstuvwxyzABC"
MOST_STEPS = 4
STEP = re.compile(r"`(?P<path>[\w./-]+\.\w+)`: (?P<symbols>`[^`]+`(?:, `[^`]+`(?!:))*)")
BARE = re.compile(r"`([\w.-]+/[\w./-]+)`")


def sections() -> dict[str, str]:
    """Map each question's letter to its text."""
    _, *parts = re.split(r"^## \((\w)\) ", (ROOT / "docs/find-your-way.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def steps(text: str) -> list[tuple[str, str]]:
    """Return the steps of a section in order, each as a file and its symbols."""
    return [(step["path"], step["symbols"]) for step in STEP.finditer(text)]


@cache
def names_in(path: str) -> set[str]:
    """Return the names that a Python file defines: top-level names, and `Class.member` of its classes."""
    top = ast.parse((ROOT / path).read_text()).body
    members = [(node.name, member) for node in top if isinstance(node, ast.ClassDef) for member in node.body]
    return {name for node in top for name in defined(node)} | {
        f"{owner}.{name}" for owner, member in members for name in defined(member)
    }


def defined(node: ast.stmt) -> set[str]:
    """Return the name that a statement defines, if any."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return {name}
    return set()


def is_in(path: str, symbol: str) -> bool:
    """Return whether a Python file defines a symbol, or another file contains it as a word."""
    if not (ROOT / path).is_file():
        return False
    if path.endswith(".py"):
        return symbol in names_in(path)
    return re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", (ROOT / path).read_text()) is not None


def longest(text: str) -> int:
    """Return the highest number of a step in a section, which may hold several lists."""
    return max(int(number) for number in re.findall(r"^(\d+)\. ", text, flags=re.MULTILINE))


def test_every_question_is_answered_in_few_steps() -> None:
    """All questions are present in order, each answered by lists of at most four steps."""
    by_letter = sections()

    assert "".join(by_letter) == QUESTIONS
    assert [letter for letter, text in by_letter.items() if not steps(text)] == []
    assert [letter for letter, text in by_letter.items() if longest(text) > MOST_STEPS] == []


def test_every_step_leads_to_code() -> None:
    """Files and folders exist, and a file defines each symbol named with it."""
    lost = [
        f"({letter}) {path}: {symbol}"
        for letter, text in sections().items()
        for path, symbols in steps(text)
        for symbol in re.findall(r"`([^`]+)`", symbols)
        if not is_in(path, symbol)
    ]
    lost += [path for text in sections().values() for path in BARE.findall(text) if not (ROOT / path).exists()]

    assert lost == []
