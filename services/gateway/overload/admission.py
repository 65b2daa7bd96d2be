"""Decides which requests are served in full under overload, by priority. Pure: time is an argument.

The strain of the gateway ranges from 0 (none) to 5; each priority degrades over one unit of it:

    strain   0 ····· 1 ····· 2 ····· 3 ····· 4 ····· 5
    low        shed   shed    refused refused refused
    normal            shed    shed    refused refused       blank: served in full
    high                              shed    refused

Within its unit a priority degrades proportionally (strain 0.3: three of ten low requests are shed), so that the
capacity is used. A priority degrades only after all lower ones have degraded fully. While the edge refuses requests of
a priority, that priority and all lower ones are shed: an answer from memory is worth more than a refusal, so this least
strain refuses nobody. Afterwards they are served in full again over a second, a tenth more per window: all of them at
once would be refused again before a window shows the load.

The strain rises fast and falls slowly, one step per window, on two signals: every sample in the window found the event
loop late (a standing queue, not a single stall), or the process used more CPU time than its limit (other processes on
the machine then suffer before its own loop is late). CPU time affects only low priority. Each further unit needs a
longer delay, since important requests should rather wait than be refused, and a refusal saves little over an answer
from memory. In addition, the last places in flight are reserved for higher priorities.

Where several tenants send requests, a request above its tenant's share (tenant_loads.py) is judged as low priority,
and a request within it at one unit of strain less. A tenant within its share has places in flight even when the others
fill them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from services.contracts.access import Priority, places_for
from services.contracts.fairness import has_place
from services.contracts.tenant import DEFAULT_TENANT
from services.gateway.overload.tenant_loads import TenantLoads

MAX_STRAIN = 5.0
_WINDOW_SHARE = 0.5
"""Of the usual deadline."""
_MIN_LOOKS = 2
_RISE = 0.5
_FALL = 0.025
_RELEASE = 0.1
"""Fall of the least strain per window, once its cause is over."""
_FAR = 1.5
"""Pressure over this factor makes low priority degrade at once instead of in two steps."""
_LATE = (1.0, 2.5, 5.0, 5.0, 10.0)
"""By unit of strain: the pressure (delay or CPU time over its limit) above which the strain rises."""
_DELAY_SHARE = 0.1
"""Fraction of the usual deadline that the event loop may be late before low priority degrades."""
_CALM_SHARE = 0.7


class AdmissionDecision(StrEnum):
    """The decision on an arriving request. SHED: answered at once, from memory."""

    ADMIT = "admit"
    SHED = "shed"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits of admission.

    `max_in_flight` is the number of requests served in full at once. Low priority degrades above `max_delay_s`, the
    delay of the event loop, and `max_busy`, the fraction of time that the process is busy. Waits are judged relative to
    `deadline_s`, a request's usual deadline. `num_gateways` share the requests of an edge.
    """

    max_in_flight: int
    max_delay_s: float = 0.02
    max_busy: float = 0.4
    deadline_s: float = 0.2
    num_gateways: int = 1

    @classmethod
    def for_deadline(cls, max_in_flight: int, deadline_s: float, num_gateways: int = 1) -> Self:
        """Return limits whose delays are fractions of a request's usual deadline."""
        return cls(
            max_in_flight=max_in_flight,
            max_delay_s=_DELAY_SHARE * deadline_s,
            deadline_s=deadline_s,
            num_gateways=num_gateways,
        )


_CUT_FROM = {
    AdmissionDecision.SHED: {Priority.LOW: 0.0, Priority.NORMAL: 1.0, Priority.HIGH: 3.0},
    AdmissionDecision.REFUSE: {Priority.LOW: 2.0, Priority.NORMAL: 3.0, Priority.HIGH: 4.0},
}


class Admission:
    """Owns the strain and the accumulated fractions; called once per request."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._places = {priority: places_for(priority, limits.max_in_flight) for priority in Priority}
        self._owed: dict[tuple[AdmissionDecision, Priority, str], float] = {}
        self._tenants = TenantLoads()
        self._above_share: Mapping[tuple[str, Priority], float] = {}
        self._strain = self._least_strain = 0.0
        self._window_began_s = float("-inf")
        self._busy_before_s = 0.0
        self._num_looks = 0
        self._least_delay_s = float("inf")

    @property
    def limits(self) -> AdmissionLimits:
        return self._limits

    @property
    def strain(self) -> float:
        """The strain, 0 to 5."""
        return max(self._strain, self._least_strain)

    def looked(self, now_s: float, loop_delay_s: float, busy_s: float, least_strain: float = 0.0) -> None:
        """Record a sample: the delay of the event loop, the total CPU seconds of the process, and the least strain."""
        self._least_strain = max(self._least_strain, least_strain)
        self._num_looks += 1
        self._least_delay_s = min(self._least_delay_s, loop_delay_s)
        lasted_s = now_s - self._window_began_s
        if lasted_s < _WINDOW_SHARE * self._limits.deadline_s or self._num_looks < _MIN_LOOKS:
            return
        late = self._least_delay_s / self._limits.max_delay_s
        busy = (busy_s - self._busy_before_s) / lasted_s / self._limits.max_busy
        self._strain = strain_after(self._strain, max(late, min(busy, _LATE[1])))
        self._least_strain = max(least_strain, _fallen(self._least_strain, late, _RELEASE))
        self._tenants.passed(lasted_s, is_late=late > _LATE[0])
        self._above_share = self._tenants.above_share() if self.strain else {}
        self._window_began_s, self._busy_before_s = now_s, busy_s
        self._num_looks, self._least_delay_s = 0, float("inf")

    def arrived(self, priority: Priority, tenant: str, weight: float) -> None:
        """Count an arriving request of a tenant of this weight."""
        self._tenants.arrived(tenant, weight, priority)

    def share_of(self, tenant: str, weight: float) -> float:
        """Return a tenant's share of the capacity, of the tenants that now send requests: 0 to 1."""
        return self._tenants.share_of(tenant, weight)

    def judge(
        self,
        priority: Priority,
        num_in_flight: int,
        tenant: str = DEFAULT_TENANT,
        weight: float = 1.0,
        num_own: int = 0,
        queue_s: float = 0.0,
    ) -> AdmissionDecision:
        """Decide on an arriving request, while `num_in_flight` others are served in full, `num_own` of its tenant.

        Requests at hand that take `queue_s` shed at once what they would shed after a few windows; high priority too,
        if they take half of the usual deadline.
        """
        if self._strain and self._is_due(AdmissionDecision.REFUSE, priority, tenant, self._strain):
            return AdmissionDecision.REFUSE
        queued = queue_s / self._limits.max_delay_s
        strain = max(self.strain, float(sum(queued > late for late in _LATE[:2])))
        if queued > _LATE[2]:
            return AdmissionDecision.SHED
        if num_in_flight >= (places := self._places[priority]) and not has_place(
            num_in_flight, places, num_own, self.share_of(tenant, weight)
        ):
            return AdmissionDecision.SHED
        if strain and self._is_due(AdmissionDecision.SHED, priority, tenant, strain):
            return AdmissionDecision.SHED
        self._tenants.served()
        return AdmissionDecision.ADMIT

    def _is_due(self, verdict: AdmissionDecision, priority: Priority, tenant: str, strain: float) -> bool:
        """Spread the fraction to cut evenly over a tenant's requests: 0.25 selects every fourth.

        A tenant that has just come is within its share.
        """
        if self._above_share:
            above = self._above_share.get((tenant, priority), 0.0)
            share = above * _cut_of(verdict, strain, Priority.LOW)
            share += (1 - above) * _cut_of(verdict, strain - 1, priority)
        else:
            share = _cut_of(verdict, strain, priority)
        if not 0 < share < 1:
            return share >= 1
        owed = self._owed.get((verdict, priority, tenant), 0.0) + share
        self._owed[verdict, priority, tenant] = owed % 1
        return owed >= 1


def strain_that_sheds(priority: Priority) -> float:
    """Return the least strain at which all requests of this priority are answered from memory."""
    return _CUT_FROM[AdmissionDecision.SHED][priority] + 1.0


def _cut_of(verdict: AdmissionDecision, strain: float, priority: Priority) -> float:
    """Return the fraction of a priority that is shed, or refused, at this strain."""
    return min(1.0, max(0.0, strain - _CUT_FROM[verdict][priority]))


def strain_after(strain: float, pressure: float) -> float:
    """Return the strain after a window with this pressure: the least delay (or the CPU time) over its limit."""
    if strain < 1 and pressure > _FAR * _LATE[0]:
        return 1.0
    if strain < MAX_STRAIN and pressure > _LATE[int(strain)]:
        return min(math.floor(strain) + 1.0, strain + _RISE)
    return _fallen(strain, pressure, _FALL)


def _fallen(strain: float, pressure: float, step: float) -> float:
    is_calm = strain > 0 and pressure < _CALM_SHARE * _LATE[math.ceil(strain) - 1]
    return max(0.0, strain - step) if is_calm else strain
