"""Tables on the terminal: of rows of results, and live of a running load, its last two seconds and the whole run."""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.load.open_loop import Shot, percentile

_WINDOW_S = 2.0
_BAR = 16
_COLOURS = {"precomputed": "cyan", "llm": "green", "student": "yellow", "popular": "magenta", "none": "red"}


def table_of(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Table:
    """Return these fields of the rows, one column each; what was not measured is empty."""
    table = Table(*fields, box=None)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in fields))
    return table


class LiveView:
    """Collects finished requests; rich renders it as a table four times a second."""

    def __init__(self, title: str, deadline_ms: float) -> None:
        self.title = title
        self.phase = ""
        self._deadline_ms = deadline_ms
        self._recent: deque[tuple[float, Shot]] = deque()
        self._num = self._num_in_time = 0

    def ended(self, shot: Shot) -> None:
        """Record a request that finished or was given up."""
        self._recent.append((time.monotonic(), shot))
        self._num += 1
        self._num_in_time += shot.is_in_time(self._deadline_ms)

    def __rich__(self) -> Table:
        """Render the table."""
        now_s = time.monotonic()
        while self._recent and self._recent[0][0] < now_s - _WINDOW_S:
            self._recent.popleft()
        recent = [shot for _, shot in self._recent]
        table = Table(box=None, title=f"{self.title}  {self.phase}", title_justify="left")
        for column in ("rate/s", "p50 ms", "p99 ms", "in time", "of all", "tiers, last 2 s"):
            table.add_column(column, justify="left" if "tiers" in column else "right", no_wrap=True)
        table.add_row(f"{len(recent) / _WINDOW_S:.0f}", *self._latencies(recent), self._share(), tier_bar(recent))
        return table

    def _latencies(self, recent: Sequence[Shot]) -> tuple[str, str, str]:
        if not recent:
            return "-", "-", "-"
        latencies_ms = [shot.latency_ms for shot in recent]
        in_time = sum(shot.is_in_time(self._deadline_ms) for shot in recent) / len(recent)
        return f"{percentile(latencies_ms, 0.5):.1f}", f"{percentile(latencies_ms, 0.99):.1f}", f"{100 * in_time:.1f} %"

    def _share(self) -> str:
        return f"{100 * self._num_in_time / self._num:.2f} %" if self._num else "-"


def tier_bar(shots: Sequence[Shot]) -> str:
    """Return the mix of tiers as coloured bars with names, one a line, in rich markup."""
    tiers = Counter(shot.outcome.tier for shot in shots)
    parts = []
    for tier, colour in _COLOURS.items():
        if count := tiers[tier]:
            bar = "█" * max(1, round(_BAR * count / len(shots)))
            parts.append(f"[{colour}]{bar} {'failed' if tier == 'none' else tier} {count / len(shots):.0%}[/]")
    return "\n".join(parts)
