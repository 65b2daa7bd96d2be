"""Predicts the duration of a step from earlier steps, and the number of rows that fit into a given duration.

Pure: no clock. A step cannot be interrupted: while it runs, no text gets a token, no cancel or deadline takes effect,
and a health check cannot distinguish a slow step from a hung step. So a step's rows (prompt tokens, decode tokens,
beams) are bounded by their measured time.
"""

from collections import deque
from statistics import median

_WINDOW = 5
"""Number of recent steps in the median, which ignores a step that was slow for an unrelated reason, such as a suspended
process."""
_MIN_ROWS = 16
"""A step with fewer rows takes as long as a decode step: the time to read the weights."""
_FIRST_ROWS = 32
"""Row limit until the first measurement."""
_DECODE_STEPS = 2
"""A step may always take as long as this many decode steps; otherwise a large model would read its weights for every
few tokens."""

_SHORTEST_ROW_S = 1e-9
"""Below every real time: a coarse clock may measure zero."""


class StepTime:
    """The measured times of one engine's steps. Changed only by the engine's thread.

    `target_s` is the maximum duration of a step; None for no limit on rows.
    """

    def __init__(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._row_s: deque[float] = deque(maxlen=_WINDOW)
        self._decode_s: deque[float] = deque(maxlen=_WINDOW)

    def record(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step. It includes the time to read the weights, so steps of few rows look expensive."""
        if num_rows >= _MIN_ROWS:
            self._row_s.append(seconds / num_rows)
        elif num_rows:
            self._decode_s.append(seconds)

    def max_rows(self) -> int | None:
        """Return the maximum number of rows of a step; None for no limit."""
        if self._target_s is None:
            return None
        if not self._row_s:
            return _FIRST_ROWS
        target_s = max(self._target_s, _DECODE_STEPS * _median(self._decode_s))
        return max(_MIN_ROWS, int(target_s / max(_median(self._row_s), _SHORTEST_ROW_S)))

    def predicted_s(self, num_rows: int) -> float:
        """Return the duration of a step with this many rows; 0 before the first measurement."""
        return _median(self._decode_s) + num_rows * _median(self._row_s)


def _median(values: deque[float]) -> float:
    return median(values) if values else 0.0
