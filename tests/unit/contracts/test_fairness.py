"""Fair shares against slow, obvious simulations: a level that rises in small steps, and one request at a time."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from services.contracts.fairness import FairOrder, fair_level, has_place

WANTED = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 20), min_size=1)
WEIGHTS = st.fixed_dictionaries({tenant: st.integers(1, 4) for tenant in "abcde"})
STEP = Fraction(1, 100)


def poured(wanted: dict[str, int], weights: dict[str, int], capacity: Fraction) -> dict[str, Fraction]:
    """Return tenants' parts if all get a little in turn, by weight, until all have enough or no capacity remains."""
    got = dict.fromkeys(wanted, Fraction(0))
    while hungry := [tenant for tenant in wanted if got[tenant] < wanted[tenant]]:
        step = min(STEP, *((wanted[tenant] - got[tenant]) / weights[tenant] for tenant in hungry))
        if (cost := step * sum(weights[tenant] for tenant in hungry)) > capacity:
            step, cost = capacity / sum(weights[tenant] for tenant in hungry), capacity
        for tenant in hungry:
            got[tenant] += step * weights[tenant]
        capacity -= cost
        if not capacity:
            break
    return got


@given(wanted=WANTED, weights=WEIGHTS, percent=st.integers(0, 120))
def test_the_level_is_where_a_slow_pour_ends(wanted: dict[str, int], weights: dict[str, int], percent: int) -> None:
    """Each tenant gets as much as in the simulation, and no capacity remains while a tenant wants more."""
    capacity = Fraction(sum(wanted.values()) * percent, 100)

    level = fair_level(wanted, weights, capacity)

    expected = poured(wanted, weights, capacity)
    got = {
        tenant: min(wanted[tenant], level * weights[tenant]) if level < math.inf else wanted[tenant]
        for tenant in wanted
    }
    assert all(math.isclose(got[tenant], expected[tenant], abs_tol=1e-9) for tenant in wanted)
    assert math.isclose(sum(got.values()), min(capacity, sum(wanted.values())), abs_tol=1e-9)


COSTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), max_size=60)


@given(costs=COSTS, weights=WEIGHTS)
def test_tenants_with_work_get_equal_service_for_their_weights(
    costs: list[tuple[str, int]], weights: dict[str, int]
) -> None:
    """While both wait, service by weight differs by at most the longest work of each (Goyal et al., theorem 1)."""
    queues = {name: [cost for tenant, cost in costs if tenant == name] for name in "ab"}
    order, served = FairOrder(), {"a": Fraction(0), "b": Fraction(0)}
    longest = sum(Fraction(max(queues[name], default=0), weights[name]) for name in "ab")

    while all(queues.values()):
        tenant = order.next(queues)
        cost = queues[tenant].pop(0)
        order.charge(tenant, weights[tenant], cost)
        served[tenant] += Fraction(cost, weights[tenant])
        assert abs(served["a"] - served["b"]) <= longest


def test_an_idle_tenant_is_owed_nothing_and_owes_nothing_twice() -> None:
    """A tenant that comes late is next, then they take turns; earlier work of a single tenant delays neither."""
    order = FairOrder()
    for _ in range(100):
        order.charge(order.next("a"), 1, 1)

    turns = []
    for _ in range(4):
        turns.append(order.next("ab"))
        order.charge(turns[-1], 1, 1)

    assert sorted(turns) == ["a", "a", "b", "b"]
    assert turns[0] != turns[1]


def test_tenants_that_left_take_no_memory() -> None:
    """Virtual times that have passed are dropped."""
    order = FairOrder()
    for number in range(1_000):
        order.charge(order.next([f"{number}"]), 1, 1)
        order.next(["next"])
        order.charge("next", 1, 2)

    assert len(order._ends) < 200


def test_a_free_place_is_for_anybody_and_a_share_is_kept_for_its_owner() -> None:
    """A single tenant may hold all places and no more; another tenant takes its share although no place is free."""
    assert [has_place(held, 8, held, 1.0) for held in (0, 7, 8)] == [True, True, False]
    assert [has_place(8 + own, 8, own, 0.5) for own in range(6)] == [True] * 4 + [False] * 2
    assert has_place(8, 8, 0, 0.001)
