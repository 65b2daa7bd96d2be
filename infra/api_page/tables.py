"""Markdown tables."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table; a bar or a line's end inside a cell does not break it."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("|--- |", "|---|")
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()) or "-"
