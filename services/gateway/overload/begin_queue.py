"""Orders requests that were read but have not begun: a few per turn of the loop, by tenant, priority, newest first.

Does not know load or tiers; the caller decides whether a request that begins late is shed.
"""

import asyncio
import heapq
import math
from collections.abc import Callable
from itertools import count

from services.contracts.access import Priority
from services.contracts.fairness import FairOrder
from services.contracts.tenant import DEFAULT_TENANT
from services.router.deadline import Deadline

_LATE_SHARE = 0.5
"""Queued past this fraction of its deadline, a request begins late: too little time is left to rank."""
_DRAIN_SHARE = 0.1
"""Of the usual deadline: if one request per turn would take longer, more begin."""
_MAX_PER_TURN = 8
_NEWEST_WEIGHT = 0.1
_LONGEST_TURN_SHARE = 0.5
"""Fraction of the usual deadline: a longer turn is a stall and does not predict the next turn."""


_Waiting = tuple[Priority, float, int, float, float, asyncio.Future[bool]]
"""Priority, negative arrival, number, weight of the tenant, time at which it is late, and whether it may begin."""


class BeginQueue:
    """Owns the queued requests of one event loop and begins one per turn, or a few if turns are long.

        read ──▶ wait (until half of the deadline is over) ──┬─▶ in time: features, ranking, answer
                                                             └─▶ late: an answer from memory

    The tenants take turns by weight (services/contracts/fairness.py). Of a tenant, higher priority begins first, then
    the newest. Without the queue, all requests that were read at once would begin in one turn, oldest first: under
    overload each of them is late. With an empty queue, a request begins at once. `deadline_s` is a request's usual
    deadline.
    """

    def __init__(self, clock: Callable[[], float], deadline_s: float) -> None:
        self._clock = clock
        self._drain_s = _DRAIN_SHARE * deadline_s
        self._longest_turn_s = _LONGEST_TURN_SHARE * deadline_s
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
    def turn_s(self) -> float:
        """The mean turn of the loop while requests wait; zero while none waits."""
        return self._turn_s if self._num_waiting else 0.0

    @property
    def delay_s(self) -> float:
        """Estimated wait of a request that is read now and begins after all queued requests."""
        return self._num_waiting * self._turn_s / self._num_per_turn

    @property
    def _num_per_turn(self) -> int:
        return min(_MAX_PER_TURN, max(1, math.ceil(self._num_waiting * self._turn_s / self._drain_s)))

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
        """Begin the next queued requests, if any."""
        now_s = self._clock()
        lasted_s = min(now_s - self._turned_s, self._longest_turn_s)
        self._turned_s = now_s
        self._turn_s += _NEWEST_WEIGHT * (lasted_s - self._turn_s)
        self._release_late(now_s)
        num_due, num_begun = self._num_per_turn, 0
        while self._by_rank and num_begun < num_due:
            tenant = self._order.next(self._by_rank)
            *_, weight, late_s, may_begin = heapq.heappop(self._by_rank[tenant])
            if not self._by_rank[tenant]:
                del self._by_rank[tenant]
            if not may_begin.done():
                self._order.charge(tenant, weight, 1)
                may_begin.set_result(now_s < late_s)
                num_begun += 1
        if num_begun:
            self._arm()
        else:
            self._by_late.clear()
            self._is_armed = False

    def _release_late(self, now_s: float) -> None:
        """Begin up to `_MAX_PER_TURN` late requests; skip requests that have begun or left."""
        num_late = 0
        while self._by_late and self._by_late[0][0] <= now_s and num_late < _MAX_PER_TURN:
            may_begin = heapq.heappop(self._by_late)[-1]
            if not may_begin.done():
                may_begin.set_result(False)
                num_late += 1
