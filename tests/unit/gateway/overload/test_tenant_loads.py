"""Tenants under overload, on a simulated gateway: only a tenant above its share is cut back."""

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.access import Priority
from services.gateway.overload.admission import Admission, AdmissionDecision, AdmissionLimits
from services.gateway.overload.tenant_loads import TenantLoads

STEP_S = 0.02
FULL_MS, CUT_MS = 10.0, 0.3
"""Time of the loop for a request in full, and for one that is shed or refused."""


@dataclass
class Caller:
    """A tenant's steady traffic."""

    tenant: str
    rate_rps: float
    weight: float = 1.0
    priority: Priority = Priority.NORMAL
    owed: float = 0.0

    def due(self) -> int:
        """Return the number of its requests that arrive in the next step."""
        self.owed += self.rate_rps * STEP_S
        num, self.owed = int(self.owed), self.owed % 1
        return num


@dataclass
class Gateway:
    """An event loop that reads, judges and works off requests in order, one at a time."""

    admission: Admission = field(default_factory=lambda: Admission(AdmissionLimits(max_in_flight=10_000, max_busy=1e9)))
    now_s: float = 0.0
    queue: deque[tuple[float, Caller]] = field(default_factory=deque)
    behind_s: float = 0.0

    def run(self, callers: list[Caller], seconds: float) -> dict[str, Counter[str]]:
        """Return the decisions by tenant."""
        decisions = {caller.tenant: Counter[str]() for caller in callers}
        for _ in range(round(seconds / STEP_S)):
            for caller in callers:
                self.queue.extend([(self.now_s, caller)] * caller.due())
            self.behind_s = min(0.0, self.behind_s) + STEP_S
            while self.queue and self.behind_s > 0:
                decision = self._judge(self.queue.popleft()[1])
                decisions[decision[0]][decision[1]] += 1
            self.now_s += STEP_S
            waited_s = self.now_s - self.queue[0][0] if self.queue else 0.0
            self.admission.looked(self.now_s, min(waited_s, 0.1), 0.0)
        return decisions

    def _judge(self, caller: Caller) -> tuple[str, str]:
        self.admission.arrived(caller.priority, caller.tenant, caller.weight)
        decision = self.admission.judge(caller.priority, 0, caller.tenant, caller.weight)
        self.behind_s -= (FULL_MS if decision is AdmissionDecision.ADMIT else CUT_MS) / 1_000
        return caller.tenant, decision.value


@pytest.mark.parametrize("priority", Priority)
def test_a_tenant_at_five_times_its_share_degrades_itself(priority: Priority) -> None:
    """B, within its share, is served in full at each priority of A; both together get no less than without tenants."""
    gateway, without = Gateway(), Gateway()
    callers = [Caller("a", 250.0, priority=priority), Caller("b", 35.0)]
    gateway.run(callers, 10.0)
    without.run([Caller("", 285.0)], 10.0)

    counts = gateway.run(callers, 20.0)

    assert counts["b"]["admit"] >= 0.99 * 20.0 * 35.0
    together = counts["a"]["admit"] + counts["b"]["admit"]
    assert together >= 0.95 * without.run([Caller("", 285.0)], 20.0)[""]["admit"]


def test_shares_are_by_weight() -> None:
    """Of two floods, the tenant with three times the weight is served three times as much."""
    gateway = Gateway()
    callers = [Caller("a", 300.0, weight=3.0), Caller("b", 300.0)]
    gateway.run(callers, 10.0)

    counts = gateway.run(callers, 40.0)

    assert counts["a"]["admit"] / counts["b"]["admit"] == pytest.approx(3.0, rel=0.1)


def test_a_lone_tenant_has_all_of_the_capacity() -> None:
    """The share of idle tenants is used: one tenant's decisions equal a stack's without tenants."""
    alone, before = Gateway(), Gateway()
    alone.run([Caller("b", 35.0)], 5.0)
    alone.run([], 10.0)
    alone.now_s = before.now_s = 0.0
    alone.admission = Admission(AdmissionLimits(max_in_flight=10_000, max_busy=1e9))

    with_tenant = alone.run([Caller("a", 200.0)], 20.0)["a"]

    assert with_tenant == before.run([Caller("", 200.0)], 20.0)[""]


def test_a_tenant_within_its_share_has_a_place_in_flight_when_all_are_taken() -> None:
    """The other tenant's requests fill the places; its own next request is shed."""
    admission = Admission(AdmissionLimits(max_in_flight=8))
    for tenant in ("a", "b"):
        admission.arrived(Priority.HIGH, tenant, 1.0)
    admission.looked(0.0, 0.0, 0.0)
    admission.looked(1.0, 0.0, 0.0)

    decided = [
        admission.judge(Priority.HIGH, 8, tenant, 1.0, num_own) for tenant, num_own in (("a", 8), ("b", 0), ("b", 4))
    ]

    assert decided == [AdmissionDecision.SHED, AdmissionDecision.ADMIT, AdmissionDecision.SHED]


@given(
    asked=st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.sampled_from(Priority)), st.integers(1, 50), min_size=1, max_size=9
    ),
    weights=st.fixed_dictionaries({tenant: st.sampled_from([1.0, 2.0, 5.0]) for tenant in "abc"}),
    capacity=st.integers(0, 200),
)
def test_a_slow_split_of_the_capacity_gives_the_same_shares(
    asked: dict[tuple[str, Priority], int], weights: dict[str, float], capacity: int
) -> None:
    """Tenants take capacity in turn, a little at a time by weight, each for its highest priority first."""
    loads, step = TenantLoads(), 0.01
    for (tenant, priority), num in asked.items():
        for _ in range(num):
            loads.arrived(tenant, weights[tenant], priority)
    for _ in range(capacity):
        loads.served()
    loads.passed(0.1, is_late=False)
    kept, left = dict.fromkeys(sorted(asked), 0.0), float(capacity)
    while left > step and (
        hungry := {tenant for tenant, _ in asked if any(kept[k] < asked[k] for k in kept if k[0] == tenant)}
    ):
        for tenant in hungry:
            part = step * weights[tenant]
            for key in (key for key in kept if key[0] == tenant):
                more = min(part, asked[key] - kept[key], left)
                kept[key], part, left = kept[key] + more, part - more, left - more

    above = loads.above_share()

    is_one = len({tenant for tenant, _ in asked}) == 1
    assert (above == {}) if is_one else all(abs((1 - above[key]) * asked[key] - kept[key]) < 0.2 for key in asked)
