"""What each tenant asks of this gateway, and which of its requests are above its share. Pure: time is an argument.

The capacity is what the gateway served in full while its loop was late. Weighted max-min fairness
(services/contracts/fairness.py) splits it into the tenants' shares, by their demand. A tenant's lower priorities are
above its share first. A single tenant is never above its share.

    capacity 100    A asks 250, B asks 40, equal weights    shares 60 and 40    190 requests of A are above its share
                    A asks 250, B asks 90                   50 and 50           200 of A, 40 of B
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.contracts.access import Priority
from services.contracts.fairness import fair_level

_AVERAGED_S = 1.0
"""Time constant of the average of a tenant's requests (as in core-stateless fair queueing, Stoica et al., 1998)."""
_FORGOTTEN = 0.01
_SHARED = 0.8
"""Fraction of the capacity that is split into shares; a late loop recovers in the rest."""
_SEVERAL = 2


@dataclass(slots=True)
class _Load:
    weight: float
    num_new: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))
    mean: dict[Priority, float] = field(default_factory=lambda: dict.fromkeys(Priority, 0.0))

    @property
    def total(self) -> float:
        """Its recent requests of all priorities."""
        return sum(self.mean.values())


class TenantLoads:
    """The recent requests of each tenant."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._num_served = 0
        self._served = self._capacity = 0.0

    def arrived(self, tenant: str, weight: float, priority: Priority) -> None:
        """Count a request of a tenant of this weight."""
        load = self._loads.get(tenant)
        if load is None:
            load = self._loads[tenant] = _Load(weight)
        load.weight = weight
        load.num_new[priority] += 1

    def served(self) -> None:
        """Count a request that is served in full."""
        self._num_served += 1

    def passed(self, lasted_s: float, *, is_late: bool) -> None:
        """Record the end of a window, and whether the loop was late."""
        kept = math.exp(-lasted_s / _AVERAGED_S)
        self._served, self._num_served = kept * self._served + self._num_served, 0
        self._capacity = _SHARED * self._served if is_late else max(self._capacity, self._served)
        for load in self._loads.values():
            load.mean = {priority: kept * load.mean[priority] + num for priority, num in load.num_new.items()}
            load.num_new = dict.fromkeys(Priority, 0)
        self._loads = {tenant: load for tenant, load in self._loads.items() if load.total > _FORGOTTEN}

    def share_of(self, tenant: str, weight: float) -> float:
        """Return a tenant's share of the capacity, of the tenants that now send requests: 0 to 1."""
        others = sum(load.weight for other, load in self._loads.items() if other != tenant)
        return weight / (weight + others)

    def above_share(self) -> Mapping[tuple[str, Priority], float]:
        """Return the fraction of the requests above the share, by tenant and priority; empty for a single tenant."""
        if len(self._loads) < _SEVERAL:
            return {}
        wanted = {tenant: load.total for tenant, load in self._loads.items()}
        weights = {tenant: load.weight for tenant, load in self._loads.items()}
        level = fair_level(wanted, weights, self._capacity)
        above = {}
        for tenant, load in self._loads.items():
            left = min(wanted[tenant], level * weights[tenant])
            for priority, num in load.mean.items():
                within = min(left, num)
                above[tenant, priority] = 1 - within / num if num else 0.0
                left -= within
        return above
