"""A progress bar, drawn by rich where it is installed and left out where it is not, as on a bare GPU machine."""

import sys
from types import TracebackType
from typing import Any, Self


class Progress:
    """Counts `total` parts of work. Draws on standard error."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> Self:
        """Begin to draw."""
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return self
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.description}"),
        )
        self._bar = progress.Progress(*columns, console=Console(stderr=True))
        self._bar.start()
        self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last drawing."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, what: str) -> None:
        """Tell what is being done."""
        if self._bar is not None:
            self._bar.update(0, description=what)
        else:
            print(f"{self._done}/{self._total} {what}", file=sys.stderr)

    def advance(self) -> None:
        """Count one part as done."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(0)
