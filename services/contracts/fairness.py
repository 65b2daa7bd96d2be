"""How tenants share scarce capacity by weight: who is next in a queue, and who is cut back first. Pure.

Weighted max-min fairness (Bertsekas and Gallager, Data Networks, 2nd edition, 1992, section 6.5): each tenant gets the
capacity that it asks for, up to a level times its weight; the level is the same for all. A tenant within its share is
served in full, and other tenants get the rest of its share, so no capacity is idle while a tenant wants it.

    fair_level    splits a capacity at once, by the demand of each tenant     admission
    FairOrder     serves requests one by one                                 queues, the engine's steps, loading
    has_place     slots that a request keeps for its time                     in flight, waiting
"""

import math
from collections.abc import Iterable, Mapping

_MIN_PRUNED = 64


def fair_level(wanted: Mapping[str, float], weights: Mapping[str, float], capacity: float) -> float:
    """Return the level: each tenant gets the lesser of its demand and level * weight, `capacity` in all.

    Infinite if the capacity suffices for all.
    """
    left, weight = capacity, sum(weights[tenant] for tenant in wanted)
    for tenant in sorted(wanted, key=lambda tenant: wanted[tenant] / weights[tenant]):
        if wanted[tenant] * weight > left * weights[tenant]:
            return left / weight
        left -= wanted[tenant]
        weight -= weights[tenant]
    return math.inf


class FairOrder:
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) of the work of tenants.

    A tenant's start time grows by cost / weight with its work, and the tenant with the earliest start is next. A tenant
    that was idle starts at the present virtual time: idle time earns no credit. The cost may be charged when it is
    known, after the work (as in Sheng et al., Fairness in Serving Large Language Models, 2024).
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._max_ends = _MIN_PRUNED

    def start(self, tenant: str) -> float:
        """Return the virtual time at which the tenant's next work starts."""
        return max(self._now, self._ends.get(tenant, 0.0))

    def next(self, tenants: Iterable[str]) -> str:
        """Return whose work is next, of the tenants that have work; the first of several. Virtual time moves there."""
        chosen = min(tenants, key=self.start)
        self._now = self.start(chosen)
        return chosen

    def charge(self, tenant: str, weight: float, cost: float) -> None:
        """Count work of a tenant."""
        self._ends[tenant] = self.start(tenant) + cost / weight
        if len(self._ends) > self._max_ends:
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}
            self._max_ends = max(_MIN_PRUNED, 2 * len(self._ends))


def has_place(num_held: int, num_places: int, num_own: int, share: float) -> bool:
    """Return whether a tenant that holds `num_own` of `num_held` places may take another.

    The first tenant to ask gets a free place. Without free places, a tenant within its share (a fraction of the places,
    at least one) gets a place too: tenants beyond their shares give places back as their requests end.
    """
    return num_held < num_places or (share < 1 and num_own < max(1, int(share * num_places)))
