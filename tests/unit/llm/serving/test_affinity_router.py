"""The affinity router's rule: a session stays at its replica up to a load bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.llm.serving.affinity_router import first_with_room

BOUND = 1.25


@pytest.mark.parametrize(
    ("loads", "others", "index"),
    [
        ([], [], 0),
        ([9], [], 0),
        ([0, 0], [], 0),
        ([1, 0], [], 0),
        ([2, 0], [], 1),
        ([9, 9, 9], [], 0),
        ([9, 7, 1], [], 1),
        ([9, 9, 1], [], 2),
        ([9, 7, 8], [0, 0, 0], 1),
    ],
)
def test_a_session_leaves_a_replica_with_far_more_load(loads: list[int], others: list[int], index: int) -> None:
    """A session moves to the next replica on the ring with room, or to the least loaded candidate."""
    assert first_with_room(loads, loads + others, BOUND) == index


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=200))
def test_no_replica_is_ever_beyond_the_bound(num_replicas: int, homes: list[int]) -> None:
    """For any sessions, no replica exceeds the bound if every replica is a candidate of each session."""
    loads = [0] * num_replicas
    for home in homes:
        ring = [(home + step) % num_replicas for step in range(num_replicas)]
        loads[ring[first_with_room([loads[replica] for replica in ring], loads, BOUND)]] += 1

    assert max(loads) <= BOUND * sum(loads) / num_replicas + 1
