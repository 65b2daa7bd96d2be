"""The table of variants, in the terminal and in Markdown, and their Pareto picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from pipelines.optimize.choice import VariantDecision, VariantRow
from pipelines.publication.model_card import table

_HEADS = ("variant", "weights", "NDCG@10", "difference, 95 %", "ms a request", "tokens/s", "MB", "verdict")
_NUMBERS = ("NDCG", "difference, 95 %", "ms", "tok/s", "MB")
"""Short headings keep the table under 80 columns."""
_INCHES, _DPI = (7.0, 4.5), 120


def terminal(
    parent: VariantRow, rows: Sequence[VariantRow], verdicts: Mapping[str, VariantDecision]
) -> tuple[RenderableType, ...]:
    """Return the table for a terminal of 80 columns or more, and why variants are not published, a line each."""
    numbers = (Column(head, justify="right", no_wrap=True) for head in _NUMBERS)
    names = (Column(head, no_wrap=True) for head in ("variant", "weights"))
    shown = Table(*names, *numbers, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for cells in _cells(parent, rows, verdicts):
        shown.add_row(*cells[:-1])
    ends = (f"{row.name}: {_end(verdicts[row.name])}" for row in rows)
    return shown, *(Text(line) for line in ends)


def markdown(parent: VariantRow, rows: Sequence[VariantRow], verdicts: Mapping[str, VariantDecision]) -> str:
    return table(_HEADS, _cells(parent, rows, verdicts))


def draw(parent: VariantRow, rows: Sequence[VariantRow], verdicts: Mapping[str, VariantDecision], out: Path) -> None:
    """Write a picture: NDCG@10 with its interval against milliseconds.

    A dot's area shows its bytes, published variants are filled.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    largest = max(row.weight_bytes for row in (parent, *rows))
    for row in (parent, *rows):
        colour = "tab:blue" if row is parent else "tab:green" if verdicts[row.name].wins else "tab:grey"
        ends = [
            [max(0.0, (row.difference - row.low) * parent.ndcg)],
            [max(0.0, (row.high - row.difference) * parent.ndcg)],
        ]
        axes.errorbar([row.request_ms], [row.ndcg], yerr=ends, fmt="none", ecolor=colour, elinewidth=0.8)
        area = 30 + 270 * row.weight_bytes / largest
        axes.scatter([row.request_ms], [row.ndcg], s=area, alpha=0.6, color=colour)
        axes.annotate(row.name, (row.request_ms, row.ndcg), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("processor ms per request, one request at a time")
    axes.set_ylabel("NDCG@10 (95 % of the difference from the parent)")
    axes.set_title("area: bytes of the weights in memory; green: published")
    FigureCanvasAgg(figure)
    figure.savefig(out, format="png")


def _cells(
    parent: VariantRow, rows: Sequence[VariantRow], verdicts: Mapping[str, VariantDecision]
) -> list[tuple[str, ...]]:
    listed = [_numbers(parent, "", "the parent")]
    for row in rows:
        verdict = verdicts[row.name]
        between = f"{row.difference:+.1%} ({100 * row.low:+.1f} to {100 * row.high:+.1f})"
        listed.append(_numbers(row, between, _end(verdict)))
    return listed


def _end(verdict: VariantDecision) -> str:
    return "published" if verdict.wins else f"negative: {verdict.why}"


def _numbers(row: VariantRow, between: str, verdict: str) -> tuple[str, ...]:
    return (
        row.name,
        row.weight_kind or "-",
        f"{row.ndcg:.4f}",
        between,
        f"{row.request_ms:.2f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.weight_bytes / 1e6:.1f}",
        verdict,
    )
