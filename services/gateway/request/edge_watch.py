"""When a recommendation reached the edge, and how many of them the edge may let in at once: learned from the edge's marks."""

from collections.abc import Callable

from services.gateway.request.load_monitor import LoadMonitor
from services.router.deadline import Arrival
from services.router.edge_limit import ArrivalClock, EdgeLimit, EdgeMark

DOORS = ("rest", "grpc")
"""Each has a limit of its own: gRPC reads calls more slowly, and its queue would not show beside REST's short waits."""


class EdgeWatch:
    """Reads the marks of the requests of one process."""

    def __init__(self, load: LoadMonitor, clock: Callable[[], float]) -> None:
        self._load = load
        self._clock = clock
        self._arrivals = ArrivalClock()
        self._limits = {door: EdgeLimit() for door in DOORS}

    @property
    def announcement(self) -> str:
        """How many recommendations may be in flight at the edge, by door, as the edge reads it."""
        return " ".join(str(limit.limit) for limit in self._limits.values())

    def arrival(self, mark: EdgeMark | None, door: str) -> Arrival:
        """Return when the request that is read now arrived, on this process's clock: at the edge, where it came through it."""
        now_s = self._clock()
        if mark is None:
            return Arrival(now_s)
        waited_s = self._arrivals.waited_s(mark.stamp_ms, now_s)
        limit = self._limits[door]
        limit.observed(waited_s + self._load.turns.delay_s, mark.num_in_flight, now_s)
        self._load.waited_at_edge(door, limit.standing_wait_s, now_s)
        return Arrival(now_s - waited_s, waited_s)
