"""The affinity router's rule: a session stays at its replica up to the bound of loads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.serving.affinity_router import first_with_room

BOUND = 1.25


@pytest.mark.parametrize(
    ("loads", "place"),
    [
        ([0], 0),
        ([9], 0),
        ([0, 0], 0),
        ([1, 0], 0),
        ([2, 0], 1),
        ([1, 1], 0),
        ([9, 9, 9], 0),
        ([9, 7, 1], 1),
        ([9, 9, 1], 2),
    ],
)
def test_a_session_leaves_a_replica_that_has_far_more_to_do(loads: list[int], place: int) -> None:
    """It goes to the next one on the ring that has room."""
    assert first_with_room(loads, loads, BOUND) == place


def test_the_least_loaded_is_taken_where_none_of_the_ranked_has_room() -> None:
    """The ring's next few may all be busy while others are not."""
    assert first_with_room([9, 7, 8], [9, 7, 8, 0, 0, 0], BOUND) == 1


def test_without_a_replica_there_is_no_place() -> None:
    """The result is an index into an empty list."""
    assert first_with_room([], [], BOUND) == 0


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=200))
def test_no_replica_is_ever_beyond_the_bound(num_replicas: int, homes: list[int]) -> None:
    """Whatever the sessions, as long as every replica is on everybody's way."""
    loads = [0] * num_replicas
    for home in homes:
        ring = [(home + step) % num_replicas for step in range(num_replicas)]
        loads[ring[first_with_room([loads[place] for place in ring], loads, BOUND)]] += 1

    assert max(loads) <= BOUND * sum(loads) / num_replicas + 1
