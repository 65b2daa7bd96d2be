"""The terminal's display while the pipeline runs: one bar a stage, then one table of metrics.

Does not know what a stage does.
"""

import time
from collections.abc import Container, Mapping
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from pipelines.runner import stage
from pipelines.runner.remaining import FITS, RemainingTime

_COLUMNS = ("hr@5", "ndcg@5", "hr@10", "ndcg@10", "hr@10_unmasked", "ndcg@10_unmasked")


class Bars:
    """A progress bar for each stage; without a terminal, a line for each stage. A context manager."""

    def __init__(self, console: Console, stages: Container[str] = tuple(FITS)) -> None:
        """Show stages on this console, and estimate the time of the fits among these names."""
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[words]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}
        self._remaining = RemainingTime(stages)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, name: str) -> stage.Progress:
        """Show a stage as begun, and return the function that moves its bar."""
        bar = self._bars[name] = self._progress.add_task(name, total=None, words="")
        self._remaining.begin(name, time.monotonic())

        def move(done: int, total: int, words: str) -> None:
            self._progress.update(bar, completed=done, total=total, words=words)
            if line := self._remaining.line(done, total, time.monotonic()):
                self._console.print(line, markup=False)

        return move

    def end(self, output: stage.StageOutput) -> None:
        """Show a stage as done."""
        self._remaining.end(output.seconds)
        bar = self._bars[output.stage]
        self._progress.update(bar, completed=1, total=1)
        if output.skipped:
            self._progress.update(bar, words="done before")
        self._progress.stop_task(bar)
        if not self._console.is_terminal:
            words = "done before" if output.skipped else f"{output.seconds:.0f} s"
            self._console.print(f"{output.stage:<12}{words}")


def metrics_table(report: Mapping[str, Any]) -> Table:
    """Lay an evaluation out as a table, one model a row."""
    heads = [column.replace("_unmasked", "\nunmasked") for column in _COLUMNS]
    table = Table(
        "model",
        *heads[:4],
        "95 %",
        *heads[4:],
        title=(
            f"{report['dataset']}: test set, items that the user has seen "
            f"{'ranked too' if report['repeats'] else 'skipped unless unmasked'}"
        ),
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name, metrics in report["metrics"].items():
        numbers = [f"{metrics[column]:.4f}" for column in _COLUMNS]
        low, high = metrics["ndcg@10_interval"]
        table.add_row(name, *numbers[:4], f"{low:.3f}-{high:.3f}", *numbers[4:])
    return table
