"""Learns how many recommendations may be in flight at the edge, so that none waits long before a gateway reads it.

Pure: time is an argument. The signal is the standing queue: the least wait of a window's requests between the edge and
this process, plus the wait in this process's queue. Above the target, the limit falls to between half and four fifths
of the requests in flight, and only requests that arrived afterwards can lower it again. Far below the target, the limit
rises, from the requests in flight if more were admitted by another gateway's limit, to at most the requests in flight
plus the headroom: the further requests that the gateways can work off in a third of the deadline. A burst beyond it
would wait unread for most of its deadline before the first window shows a wait: therefore the announced limit is at
most the requests in flight of the last window plus the headroom, and only the headroom after a pause. A quarter of the
headroom is always admitted: if so few wait, other processes have the cores. Latency itself is not a signal: a request
may wait for the LLM at no cost.

`EdgeClock` measures the wait without synchronized clocks.
"""

from dataclasses import dataclass

from services.contracts.access import Priority

_WINDOW_SHARE = 0.5
"""Of the usual deadline."""
_MIN_OBSERVED = 6
"""Windows with fewer requests are extended: at low rates a single stall would affect them all."""
_TARGET_SHARE, _HEADROOM_SHARE = 0.15, 0.3
"""Of the usual deadline: the standing wait that lowers the limit, and how long a burst may take.

A gateway needs no longer queue to be busy, and a stop of the process adds to the wait of all that are queued.
"""
_CALM_SHARE = 0.5
_LEAST_FALL, _MOST_FALL = 0.8, 0.5
_RISE = 0.05
_PAUSE_SHARE = 5.0
"""Of the usual deadline."""
_MIN_LIMIT, _MIN_SHARE_OF_HEADROOM = 8, 0.25
_MAX_LIMIT = 4_096


@dataclass(frozen=True, slots=True)
class EdgeMark:
    """The edge's mark on a request: clock in ms, recommendations in flight there, and its name (may be empty).

    `refused` is the highest priority of a request that it refused in the last second.
    """

    stamp_ms: int
    num_in_flight: int
    edge: str = ""
    refused: Priority | None = None


class EdgeLimit:
    """Owns the limit; `observed` is called for each request as it is read.

    `deadline_s` is a request's usual deadline.
    """

    def __init__(self, deadline_s: float = 0.2) -> None:
        self.target_s = _TARGET_SHARE * deadline_s
        self.headroom_s = _HEADROOM_SHARE * deadline_s
        self._window_s = _WINDOW_SHARE * deadline_s
        self._pause_s = _PAUSE_SHARE * deadline_s
        self.limit = _MAX_LIMIT
        """Maximum recommendations in flight at the edge."""
        self.standing_wait_s = 0.0
        """The least wait of the last window."""
        self._began_s = float("-inf")
        self._fell_s = float("-inf")
        self._num_observed = 0
        self._least_wait_s = float("inf")
        self._most_in_flight = self._most_of_last_window = 0
        self._observed_s = float("-inf")

    def announced(self, now_s: float, headroom: int | None = None) -> int:
        """Return the limit for the edge, which the next burst may fill before a window ends."""
        if headroom is None:
            return self.limit
        has_paused = now_s - self._observed_s > self._pause_s
        most = (0 if has_paused else self._most_of_last_window) + headroom
        return max(_MIN_LIMIT, min(self.limit, most))

    def observed(self, waited_s: float, num_in_flight: int, now_s: float, headroom: int | None = None) -> None:
        """Record a request read now that waited since the edge, with this many requests in flight there.

        `headroom` is None before the cost of a request is known.
        """
        self._observed_s = now_s
        if now_s - waited_s < self._fell_s:
            return
        self._num_observed += 1
        self._least_wait_s = min(self._least_wait_s, waited_s)
        self._most_in_flight = max(self._most_in_flight, num_in_flight)
        if now_s - self._began_s < self._window_s or self._num_observed < _MIN_OBSERVED:
            return
        self.standing_wait_s = self._least_wait_s
        before, self.limit = self.limit, self._next(headroom)
        if self.limit < before:
            self._fell_s = now_s
        self._began_s, self._num_observed, self._least_wait_s = now_s, 0, float("inf")
        self._most_of_last_window, self._most_in_flight = self._most_in_flight, 0

    def _next(self, headroom: int | None) -> int:
        least = max(_MIN_LIMIT, int(_MIN_SHARE_OF_HEADROOM * (headroom or 0)))
        if self._least_wait_s > self.target_s:
            share = max(_MOST_FALL, min(_LEAST_FALL, self.target_s / self._least_wait_s))
            return max(least, int(share * min(self.limit, self._most_in_flight)))
        if self._least_wait_s < _CALM_SHARE * self.target_s:
            most = _MAX_LIMIT if headroom is None else self._most_in_flight + headroom
            known = max(self.limit, self._most_in_flight)
            return max(least, min(_MAX_LIMIT, most, known + 1 + int(_RISE * known)))
        return self.limit
