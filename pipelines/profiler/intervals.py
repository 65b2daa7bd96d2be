"""Sets of time intervals: sorted, disjoint, as (N, 2) float64 arrays of starts and ends in microseconds."""

from collections.abc import Iterable

import numpy as np

Intervals = np.ndarray
NONE: Intervals = np.empty((0, 2))


def union(*many: Intervals) -> Intervals:
    """Return the union of arrays of intervals, which may overlap and be in any order. Empty intervals vanish."""
    pairs = np.concatenate([np.asarray(intervals, dtype=np.float64).reshape(-1, 2) for intervals in (NONE, *many)])
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if not len(pairs):
        return NONE
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    latest = np.maximum.accumulate(pairs[:, 1])
    first = np.flatnonzero(np.concatenate([[True], pairs[1:, 0] > latest[:-1]]))
    last = np.concatenate([first[1:] - 1, [len(pairs) - 1]])
    return np.stack([pairs[first, 0], latest[last]], axis=1)


def union_of(pairs: Iterable[tuple[float, float]]) -> Intervals:
    return union(np.array(list(pairs), dtype=np.float64).reshape(-1, 2))


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return the intersection of two sorted and disjoint sets."""
    return _where(left, right, 3)


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Return the left set without the right; both are sorted and disjoint."""
    return _where(left, right, 1)


def total(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def longer_than(intervals: Intervals, least_us: float) -> np.ndarray:
    """Return whether each interval has at least this length."""
    is_long: np.ndarray = intervals[:, 1] - intervals[:, 0] >= least_us
    return is_long


def _where(left: Intervals, right: Intervals, wanted: int) -> Intervals:
    """Return where the sum of 1 inside the left and 2 inside the right is `wanted`."""
    points = np.concatenate([left[:, 0], left[:, 1], right[:, 0], right[:, 1]])
    if not len(points):
        return NONE
    steps = np.repeat([1, -1, 2, -2], [len(left), len(left), len(right), len(right)])
    order = np.argsort(points, kind="stable")
    points, inside = points[order], np.cumsum(steps[order]) == wanted
    pairs = np.stack([points[:-1], points[1:]], axis=1)
    return union(pairs[inside[:-1]])
