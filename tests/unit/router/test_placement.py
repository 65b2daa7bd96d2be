"""The placement of many models on replicas: agreement, growth under load, and replicas that load or fail."""

from collections import Counter

import pytest

from services.contracts.access import Priority
from services.router.breaker import Breaker
from services.router.gate import LlmGate
from services.router.placement import Placement
from services.router.policy import LlmOutcome
from services.router.predictor import LatencyPredictor
from services.router.replica import RankSize, Replica

REPLICAS = tuple(f"r{index}" for index in range(5))
SIZE = RankSize(session="u", window_start=0, num_prompt_tokens=10, num_beam_rows=10)


def homes_of(placement: Placement, replicas: tuple[str, ...] = REPLICAS, now_s: float = 0.0) -> set[str]:
    """Return the replicas that sessions of a name go to."""
    return {placement.order(f"user {index}", replicas, replicas, now_s)[0] for index in range(100)}


def test_names_spread_evenly_and_few_move_when_a_replica_comes_or_goes() -> None:
    """Each replica is the home of its part of the names; a lost replica moves only its own names."""
    before = {f"n{index}": homes_of(Placement(f"n{index}", 4.0)).pop() for index in range(500)}
    after = {name: homes_of(Placement(name, 4.0), REPLICAS[1:]).pop() for name in before}

    assert min(Counter(before.values()).values()) > 60
    assert all(after[name] == home for name, home in before.items() if home != "r0")


def test_a_hot_name_gets_homes_and_loses_them() -> None:
    """Load above the bound adds a home per second up to the replicas; low load takes them away one by one."""
    placement = Placement("hot", 4.0)
    counts = []
    for second in range(10):
        placement.observe(100, len(REPLICAS), float(second))
        counts.append(placement.num_homes)
    assert counts[:5] == [2, 3, 4, 5, 5]
    assert len(homes_of(placement)) == 5

    for second in range(10, 60):
        placement.observe(0, len(REPLICAS), float(second))
    assert placement.num_homes == 1


def test_a_steady_load_keeps_the_homes() -> None:
    """A load between the two bounds changes nothing."""
    placement = Placement("steady", 4.0)
    counts = []
    for tenth in range(200):
        placement.observe(6, len(REPLICAS), tenth / 10)
        counts.append(placement.num_homes)
    assert set(counts[counts.index(2) :]) == {2}


@pytest.mark.parametrize(("load", "num_homes"), [(1, 1), (3, 2)])
def test_a_home_is_lost_when_the_others_would_be_less_than_half_full(load: int, num_homes: int) -> None:
    """Of two homes for four requests each, one is enough for a load of one request, and not for three."""
    placement = Placement("shrinking", 4.0)
    placement.observe(100, len(REPLICAS), 0.0)
    assert placement.num_homes == 2

    for second in range(10, 60):
        placement.observe(load, len(REPLICAS), float(second))

    assert placement.num_homes == num_homes


def test_while_a_home_loads_a_holder_answers() -> None:
    """After a restart the previous home answers until the new home can; a cold name loads on one replica only."""
    placement = Placement("mail", 4.0)
    home = homes_of(placement).pop()
    placement.loading(home, 0.0)
    assert homes_of(placement, now_s=0.1) == {home}

    holder = next(name for name in REPLICAS if name != home)
    placement.answered(holder)
    assert homes_of(placement, now_s=0.1) == {holder}
    placement.answered(home)
    assert homes_of(placement, now_s=0.1) == {home}


@pytest.mark.parametrize(("outcome", "is_same"), [(LlmOutcome.IN_TIME, True), (LlmOutcome.FAILED, False)])
def test_a_failing_home_is_replaced(outcome: LlmOutcome, is_same: bool) -> None:
    """Requests of a name go to the next replica of its order once its home has failed often enough."""
    placement = Placement("mail", 4.0)
    gate = LlmGate(lambda: Replica(Breaker(2, 10.0), LatencyPredictor(0.01)), 8, placement)
    first = gate.view(REPLICAS, SIZE, Priority.NORMAL, 1.0, 0.0).replicas[0]
    for _ in range(2):
        gate.ended(outcome, gate.started(first, SIZE, 0.0), 0.01)

    assert (gate.view(REPLICAS, SIZE, Priority.NORMAL, 1.0, 0.02).replicas[0] == first) is is_same
