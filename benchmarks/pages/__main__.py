"""Fill the tables of the pages from benchmarks/results: `python -m benchmarks.pages`.

A page holds a table between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of `serving`, `models` or
`many`.
"""

import re
import textwrap
from pathlib import Path

from benchmarks.pages import many, models, serving
from benchmarks.pages.table import ROOT

PAGES = ("README.md", "docs/benchmarks.md", "docs/scale.md", "docs/many-models.md")
WIDTH = 120
"""Characters of a line, as in code."""
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return a page with its tables made from the results files. Raises AttributeError for an unknown table."""
    return _TABLE.sub(lambda match: f"{match[1]}{_lines(match[2])}\n{match[3]}", text)


def table_names(text: str) -> list[str]:
    return [name for _, name, _ in _TABLE.findall(text)]


def main() -> None:
    for page in PAGES:
        path = Path(ROOT, page)
        path.write_text(filled(path.read_text()))


def _lines(name: str) -> str:
    module = next((module for module in (serving, models) if hasattr(module, name)), many)
    lines: list[str] = getattr(module, name)()
    return "\n".join(line if line.startswith("|") else wrapped(line) for line in lines)


def wrapped(line: str) -> str:
    """Return a line of prose in lines of the pages' width."""
    return textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    main()
