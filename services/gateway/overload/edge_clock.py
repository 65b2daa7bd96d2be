"""Computes how long a request waited between an edge and this process, whose clocks may differ.

Pure: times are arguments. The edge's stamp and this process's clock differ by a constant plus the wait; the least
difference of the last seconds estimates the constant. Both are wall clocks: on one machine, a clock step affects both
and cancels out. On different machines, setting the edge's clock forward lowers the difference at once. Setting it back
makes every request appear to have waited.

A wait grows no faster than time passes, except when a request was read before requests that arrived earlier, and those
were in flight at the edge when it arrived. If more consecutive requests than that waited longer than the time since a
request last arrived without waiting, the clock was set, and the constant is learned again. Callers that gave up are no
longer in flight, so the first request that contradicts the step restores the previous constant. If the gap between
requests exceeds the step, the step goes undetected for at most twenty seconds.
"""

import math
from dataclasses import dataclass

_BASE_LIFE_S = 10.0
_MARGIN_SHARE = 0.25
"""Of the usual deadline: a request that waited less counts as not waiting."""
_MIN_WAITED, _MAX_WAITED = 4, 16
"""Consecutive waiting requests before a clock step is considered.

Three more than were in flight at the edge with the last request that did not wait, which may have been read before all
of these, but at most the second number.
"""
_MIN_STEP_SHARE = 0.5
"""Of the usual deadline."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A detected clock step; a difference below `unless_below_s` contradicts it."""

    before_s: float
    unless_below_s: float


class EdgeClock:
    """Owns the clock estimate of one edge. `deadline_s` is a request's usual deadline."""

    def __init__(self, deadline_s: float = 0.2) -> None:
        self._margin_s, self._min_step_s = _MARGIN_SHARE * deadline_s, _MIN_STEP_SHARE * deadline_s
        self._least_s = self._least_before_s = math.inf
        self._began_s = -math.inf
        self._step: _Step | None = None
        self._came_at_once_s = -math.inf
        self._num_of_step = _MAX_WAITED
        self._num_waited = 0
        self._least_waited_s = math.inf

    def waited_s(self, stamp_ms: int, num_in_flight: int, wall_s: float, now_s: float) -> float:
        """Return the seconds between the stamp and now.

        Args:
            stamp_ms: The edge's clock when the request reached it (Unix time).
            num_in_flight: Requests in flight at the edge then, including this request.
            wall_s: This process's wall clock.
            now_s: This process's monotonic clock.
        """
        difference_s = wall_s - stamp_ms / 1_000
        self._age(difference_s, now_s)
        if self._step is not None and difference_s < self._step.unless_below_s:
            self._learn(self._step.before_s, now_s)
        self._least_s = min(self._least_s, difference_s)
        waited_s = difference_s - self._base_s
        if waited_s <= self._margin_s:
            self._note_at_once(now_s)
            self._num_of_step = min(_MIN_WAITED - 1 + num_in_flight, _MAX_WAITED)
            return waited_s
        self._num_waited += 1
        self._least_waited_s = min(self._least_waited_s, waited_s)
        if (
            self._num_waited < self._num_of_step
            or self._least_waited_s <= now_s - self._came_at_once_s + self._min_step_s
        ):
            return waited_s
        step_s, before_s = self._least_waited_s, self._base_s
        self._learn(before_s + step_s, now_s)
        self._step = _Step(before_s, before_s + step_s / 2)
        return waited_s - step_s

    @property
    def _base_s(self) -> float:
        return min(self._least_s, self._least_before_s)

    def _age(self, difference_s: float, now_s: float) -> None:
        """Begin a new period after ten seconds, and forget the period before the last."""
        age_s = now_s - self._began_s
        if age_s >= _BASE_LIFE_S:
            self._least_before_s = self._least_s if age_s < 2 * _BASE_LIFE_S else math.inf
            self._least_s, self._began_s, self._step = difference_s, now_s, None

    def _learn(self, base_s: float, now_s: float) -> None:
        """Restart the estimate with this difference as that of a request that did not wait."""
        self._least_s, self._least_before_s, self._began_s, self._step = base_s, math.inf, now_s, None
        self._note_at_once(now_s)

    def _note_at_once(self, now_s: float) -> None:
        """Record a request that did not wait, and restart the count of waiting requests."""
        self._came_at_once_s, self._num_waited, self._least_waited_s = now_s, 0, math.inf
