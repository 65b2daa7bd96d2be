"""Learns how many recommendations may be in flight at the edge, so that none waits long before a gateway reads it. Pure: time is an argument.

The sign is the standing queue in front of the answer: the least time that requests of a window waited between the edge and
here, with what waits for its turn here. While it is above the target, the limit falls to at most four fifths of what is in
flight, at least a half, and only requests that came afterwards can lower it again; while it is far below, the limit rises, so that
after some ten calm seconds there is none. Latency itself is no sign: a request may wait for the LLM and cost nothing.

`EdgeClock` finds that wait without comparing clocks: the edge's stamp and this process's monotonic clock differ by a constant and the wait, and
the least difference of the last seconds is the constant.
"""

from dataclasses import dataclass

_WINDOW_S = 0.1
_MIN_OBSERVED = 6
"""Fewer requests in a window say nothing: at low rates one stall would concern them all."""
_TARGET_S = 0.06
"""Above the delay at which `services.gateway.overload.admission` answers normal priority from memory: that comes first."""
_CALM_SHARE = 0.5
_LEAST_FALL, _MOST_FALL = 0.8, 0.5
_RISE = 0.05
_MIN_LIMIT = 8
_MAX_LIMIT = 4_096


@dataclass(frozen=True, slots=True)
class EdgeMark:
    """What the edge wrote on a request: its clock in milliseconds, how many recommendations were in flight there, and its name, empty if it wrote none."""

    stamp_ms: int
    num_in_flight: int
    edge: str = ""


class EdgeLimit:
    """Owns the limit; `observed` is called for each request as it is read."""

    def __init__(self) -> None:
        self.limit = _MAX_LIMIT
        """How many recommendations may be in flight at the edge."""
        self.standing_wait_s = 0.0
        """The least wait of the last window."""
        self._began_s = float("-inf")
        self._fell_s = float("-inf")
        self._num_observed = 0
        self._least_wait_s = float("inf")
        self._most_in_flight = 0

    def observed(self, waited_s: float, num_in_flight: int, now_s: float) -> None:
        """Record a request that was read now, having waited since the edge, with so many in flight there."""
        if now_s - waited_s < self._fell_s:
            return
        self._num_observed += 1
        self._least_wait_s = min(self._least_wait_s, waited_s)
        self._most_in_flight = max(self._most_in_flight, num_in_flight)
        if now_s - self._began_s < _WINDOW_S or self._num_observed < _MIN_OBSERVED:
            return
        self.standing_wait_s = self._least_wait_s
        before, self.limit = self.limit, self._next()
        if self.limit < before:
            self._fell_s = now_s
        self._began_s, self._num_observed, self._least_wait_s, self._most_in_flight = now_s, 0, float("inf"), 0

    def _next(self) -> int:
        if self._least_wait_s > _TARGET_S:
            share = max(_MOST_FALL, min(_LEAST_FALL, _TARGET_S / self._least_wait_s))
            return max(_MIN_LIMIT, int(share * min(self.limit, self._most_in_flight)))
        if self._least_wait_s < _CALM_SHARE * _TARGET_S:
            return min(_MAX_LIMIT, self.limit + 1 + int(_RISE * self.limit))
        return self.limit
