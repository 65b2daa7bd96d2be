"""The threat table of docs/access.md."""

import ast
import re

from tests.support.pages import ROOT

ROW = re.compile(r"^\| (API\d+) .*\|(?P<tests>[^|]*)\|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_risk_has_its_row_and_every_named_test_exists() -> None:
    """Each risk has a row with tests, and the named tests exist."""
    rows = {row[1]: NAMED.findall(row["tests"]) for row in ROW.finditer((ROOT / "docs/access.md").read_text())}
    named = {pair for pairs in rows.values() for pair in pairs}
    missing = [f"{path}::{name}" for path, name in sorted(named) if name not in functions_of(path)]

    assert list(rows) == [f"API{number}" for number in range(1, 11)]
    assert [risk for risk, pairs in rows.items() if not pairs] == []
    assert missing == []


def functions_of(path: str) -> set[str]:
    """Return the names of a test file's functions; empty if the file does not exist."""
    if not (ROOT / path).is_file():
        return set()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, kinds)}
