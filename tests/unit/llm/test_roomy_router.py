"""How far a session sticks to its replica: by the bound of loads alone. `pytest tests/unit/llm/test_roomy_router.py`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.serving.roomy_router import with_room


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
    """For the next one on the ring that has room."""
    assert with_room(loads, loads) == place


def test_the_idlest_is_taken_where_none_of_the_ranked_has_room() -> None:
    """The ring's next few may all be busy while others are not."""
    assert with_room([9, 7, 8], [9, 7, 8, 0, 0, 0]) == 1


def test_without_a_replica_there_is_no_place() -> None:
    """Whoever asks looks at an empty list then."""
    assert with_room([], []) == 0


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=200))
def test_no_replica_is_ever_beyond_the_bound(num_replicas: int, homes: list[int]) -> None:
    """Whatever the sessions, as long as every replica is on everybody's way."""
    loads = [0] * num_replicas
    for home in homes:
        ring = [(home + step) % num_replicas for step in range(num_replicas)]
        loads[ring[with_room([loads[place] for place in ring], loads)]] += 1

    assert max(loads) <= 1.25 * sum(loads) / num_replicas + 1
