"""Learns which part of a core the event loop gets while it has work. Pure: times are arguments.

Processor time divided by this share is how long requests take: next to busy processes, a burst that a free core would
work off in time is late. Half of a core is assumed for the first flood, since the gateways share the machine with the
edge, the stores and the LLM. The next flood finds what the last has shown, if it comes soon: the machine may be less
busy by then, and while the share is small, the edge lets in too few requests to learn it again.
"""

import math

_FIRST, _LEAST = 0.5, 0.1
_NEWEST_WEIGHT = 0.25
_LIFE_S = 10.0
_RUNNABLE_SHARE = 0.5
"""A loop that wanted a core for less of a sample was stopped or blocked: the sample does not show how busy the machine
is."""


class CoreShare:
    """Owns the share, which changes while the loop has work and returns to the first assumption otherwise."""

    def __init__(self) -> None:
        self.share = _FIRST
        self._before: tuple[float, float, float] | None = None
        self._was_busy = False

    def looked(self, now_s: float, ran_s: float, wanted_s: float, *, is_busy: bool) -> None:
        """Record a sample: how long the loop ran, and ran or waited for a core, and whether requests wait to begin."""
        looked_s, ran_before_s, wanted_before_s = self._before or (now_s, ran_s, wanted_s)
        took_s, run_s, runnable_s = now_s - looked_s, ran_s - ran_before_s, wanted_s - wanted_before_s
        if is_busy and self._was_busy and runnable_s > _RUNNABLE_SHARE * took_s:
            share = min(1.0, max(_LEAST, run_s / runnable_s))
            self.share += _NEWEST_WEIGHT * (share - self.share)
        else:
            self.share = _FIRST + math.exp(-took_s / _LIFE_S) * (self.share - _FIRST)
        self._before, self._was_busy = (now_s, ran_s, wanted_s), is_busy
