"""Orders requests that were read but have not begun: one per turn of the event loop, by tenant, priority, newest first.

Does not know load or tiers; the caller decides whether a request that begins late is shed.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from services.contracts.access import Priority
from services.contracts.fairness import FairOrder
from services.contracts.tenant import DEFAULT_TENANT
from services.router.deadline import Deadline

_LATE_SHARE = 0.5
"""Queued past this fraction of its deadline, a request begins late: too little time is left to rank."""
_MAX_LATE_PER_TURN = 8
"""An answer from memory costs some 0.2 ms."""
_NEWEST_WEIGHT = 0.1
_LONGEST_TURN_S = 0.1


_Waiting = tuple[Priority, float, int, float, float, asyncio.Future[bool]]
"""Priority, negative arrival, number, weight of the tenant, time at which it is late, and whether it may begin."""


class BeginQueue:
    """Owns the queued requests of one event loop and begins one per turn of the loop.

        read ──▶ wait (until half of the deadline is over) ──┬─▶ in time: features, ranking, answer
                                                             └─▶ late: an answer from memory

    The tenants take turns by weight (services/contracts/fairness.py). Of a tenant, higher priority begins first, then
    the newest. Without the queue, all requests that were read at once would begin in one turn, oldest first: under
    overload each of them is late, and gRPC, which accepts a call only every few turns, waits for all of them. With an
    empty queue, a request begins at once.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = count()
        self._order = FairOrder()
        self._by_rank: dict[str, list[_Waiting]] = {}
        """A heap of each tenant that has waiting requests."""
        self._by_late: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._num_waiting = 0
        self._is_armed = False
        self._turn_s = 0.0
        self._turned_s = 0.0

    @property
    def is_empty(self) -> bool:
        return not self._num_waiting

    @property
    def delay_s(self) -> float:
        """Estimated wait of a request that is read now and begins after all queued requests."""
        return self._num_waiting * self._turn_s

    async def begin(
        self, priority: Priority, deadline: Deadline, tenant: str = DEFAULT_TENANT, weight: float = 1.0
    ) -> bool:
        """Wait until this request may begin; return whether more than half of its deadline is left."""
        late_s = deadline.arrived_s + _LATE_SHARE * deadline.total_ms / 1_000
        if not self._is_armed:
            self._turned_s = self._clock()
            self._order.charge(self._order.next((tenant,)), weight, 1)
            self._arm()
            return self._turned_s < late_s
        number, may_begin = next(self._numbers), asyncio.get_running_loop().create_future()
        rank = (priority, -deadline.arrived_s, number, weight, late_s, may_begin)
        heapq.heappush(self._by_rank.setdefault(tenant, []), rank)
        heapq.heappush(self._by_late, (late_s, number, may_begin))
        self._num_waiting += 1
        try:
            is_in_time: bool = await may_begin
            return is_in_time
        finally:
            self._num_waiting -= 1

    def _arm(self) -> None:
        self._is_armed = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Begin the next queued request, if any."""
        now_s = self._clock()
        lasted_s = min(now_s - self._turned_s, _LONGEST_TURN_S)
        self._turned_s = now_s
        self._turn_s += _NEWEST_WEIGHT * (lasted_s - self._turn_s)
        self._release_late(now_s)
        while self._by_rank:
            tenant = self._order.next(self._by_rank)
            *_, weight, late_s, may_begin = heapq.heappop(self._by_rank[tenant])
            if not self._by_rank[tenant]:
                del self._by_rank[tenant]
            if not may_begin.done():
                self._order.charge(tenant, weight, 1)
                may_begin.set_result(now_s < late_s)
                self._arm()
                return
        self._by_late.clear()
        self._is_armed = False

    def _release_late(self, now_s: float) -> None:
        """Begin up to `_MAX_LATE_PER_TURN` late requests; skip requests that have begun or left."""
        num_late = 0
        while self._by_late and self._by_late[0][0] <= now_s and num_late < _MAX_LATE_PER_TURN:
            may_begin = heapq.heappop(self._by_late)[-1]
            if not may_begin.done():
                may_begin.set_result(False)
                num_late += 1
