"""Learns the recommendations in flight at the edge above which a tenant's flood is refused. Pure.

`EdgeLimit` protects the deadline: it permits a queue of a third of it. This limit protects the latency of tenants from
the queue of others: it falls while requests wait longer, on average, than a request takes processor time, and rises
while they wait less than half of that. In calm times it is a little above twice the requests in flight, so that a flood
meets it with its first requests.
"""

_WINDOW_SHARE = 0.5
"""Of the usual deadline."""
_MIN_OBSERVED = 6
_TARGET_COSTS, _CALM_COSTS = 1.0, 0.5
_LEAST_FALL, _MOST_FALL = 0.8, 0.5
_RISE = 0.05
_MIN_LIMIT, _MIN_PER_GATEWAY = 4, 2
_MAX_LIMIT = 4_096


class FairLimit:
    """Owns the limit; `observed` is called for each request as it is read. `deadline_s` is a usual deadline."""

    def __init__(self, deadline_s: float = 0.2, num_gateways: int = 1) -> None:
        self._window_s = _WINDOW_SHARE * deadline_s
        self._least = max(_MIN_LIMIT, _MIN_PER_GATEWAY * num_gateways)
        self.limit = _MAX_LIMIT
        self._began_s = self._fell_s = float("-inf")
        self._num_observed = self._most_in_flight = 0
        self._sum_waited_s = 0.0

    def observed(self, waited_s: float, num_in_flight: int, now_s: float, cost_s: float | None) -> None:
        """Record a request read now that waited since the edge, with this many requests in flight there.

        `cost_s` is the CPU time of a request; None before it is known.
        """
        if now_s - waited_s < self._fell_s:
            return
        self._num_observed += 1
        self._sum_waited_s += waited_s
        self._most_in_flight = max(self._most_in_flight, num_in_flight)
        if cost_s is None or now_s - self._began_s < self._window_s or self._num_observed < _MIN_OBSERVED:
            return
        before, self.limit = self.limit, self._next(self._sum_waited_s / self._num_observed / cost_s)
        if self.limit < before:
            self._fell_s = now_s
        self._began_s, self._num_observed, self._most_in_flight, self._sum_waited_s = now_s, 0, 0, 0.0

    def _next(self, num_costs: float) -> int:
        """Return the limit after a window whose requests waited for this many others on average."""
        if num_costs > _TARGET_COSTS:
            share = max(_MOST_FALL, min(_LEAST_FALL, _TARGET_COSTS / num_costs))
            return max(self._least, int(share * min(self.limit, self._most_in_flight)))
        if num_costs < _CALM_COSTS:
            most = min(_MAX_LIMIT, 2 * self._most_in_flight + self._least)
            return max(self._least, min(most, self.limit + 1 + int(_RISE * self.limit)))
        return self.limit
