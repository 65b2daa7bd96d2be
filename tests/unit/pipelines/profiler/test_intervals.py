"""Unions, intersections and differences of intervals, against sets of whole microseconds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.profiler.intervals import intersect, subtract, total, union_of

PAIRS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=12
)


def moments(pairs) -> set[int]:
    """Return the whole microseconds within any of these intervals."""
    return {moment for start, end in pairs for moment in range(int(start), int(end))}


@given(PAIRS)
def test_a_union_holds_each_moment_once_in_order(pairs) -> None:
    """The result is sorted and disjoint, and covers the same microseconds."""
    union = union_of(pairs)

    assert moments(union) == moments(pairs)
    assert total(union) == len(moments(pairs))
    assert (np.diff(union.ravel()) > 0).all()


@given(PAIRS, PAIRS)
def test_intersection_and_difference_are_those_of_sets(left, right) -> None:
    """Intersection and difference equal the set operations."""
    first, other = union_of(left), union_of(right)

    assert moments(intersect(first, other)) == moments(left) & moments(right)
    assert moments(subtract(first, other)) == moments(left) - moments(right)
