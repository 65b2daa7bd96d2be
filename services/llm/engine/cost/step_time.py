"""How long a step takes, predicted from the steps before it, and how many rows fit into a step of a given length. Pure: no clock.

A step cannot be interrupted: while it runs, no text gets a token, no cancel or deadline takes effect, and a health check cannot
tell a slow step from a hung one. So a step's rows (prompt tokens, decode tokens, beams) are bounded by their measured time.
"""

from collections import deque
from statistics import median

_WINDOW = 5
"""Steps that count. Their median ignores one that was slow for another reason, such as a suspended process."""
_MIN_ROWS = 16
"""A step with fewer rows takes as long as a decode step: its time is that of reading the weights."""
_FIRST_ROWS = 32
"""Rows of the steps before anything is measured."""
_DECODE_STEPS = 2
"""A step may always take as long as this many decode steps: else a large model would read its weights for every few tokens."""

_SHORTEST_ROW_S = 1e-9
"""Below every real time: a coarse clock may show none."""


class StepTime:
    """The measured times of one engine's steps. Changed by the engine's thread only.

    `target_s` is how long a step may take; None: any number of rows.
    """

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._row_s: deque[float] = deque(maxlen=_WINDOW)
        self._decode_s: deque[float] = deque(maxlen=_WINDOW)

    def record(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step. The time of reading the weights is counted with the rows, so few rows look expensive."""
        if num_rows >= _MIN_ROWS:
            self._row_s.append(seconds / num_rows)
        elif num_rows:
            self._decode_s.append(seconds)

    def max_rows(self) -> int | None:
        """Return how many rows a step should have at most; None: any number."""
        if self._target_s is None:
            return None
        if not self._row_s:
            return _FIRST_ROWS
        target_s = max(self._target_s, _DECODE_STEPS * _median(self._decode_s))
        return max(_MIN_ROWS, int(target_s / max(_median(self._row_s), _SHORTEST_ROW_S)))

    def predicted_s(self, num_rows: int) -> float:
        """Return how long a step of so many rows takes; 0 before anything is measured."""
        return _median(self._decode_s) + num_rows * _median(self._row_s)


def _median(values: deque[float]) -> float:
    return median(values) if values else 0.0
