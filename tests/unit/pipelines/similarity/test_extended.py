"""A table of related items over a larger catalogue."""

import numpy as np

from models.similar import NONE, SimilarTable
from pipelines.similarity.co_visits import Neighbours
from pipelines.similarity.extended import extended

OLD = SimilarTable(
    np.array([[1, NONE], [0, 2], [1, 0]], np.int32), np.array([[0.5, 0], [0.9, 0.2], [0.8, 0.1]], np.float16)
)
PLACES = np.array([0, 2, 3])


def test_old_items_keep_their_neighbours() -> None:
    """Rows move to the items' new indices; items without neighbours have empty rows."""
    table = extended(OLD, PLACES, 4)

    assert table.neighbours_VN.tolist() == [[2, NONE], [NONE, NONE], [0, 3], [2, 0]]
    assert table.scores_VN[1].tolist() == [0, 0]


def test_a_new_item_joins_the_rows_of_its_neighbours() -> None:
    """A row keeps its best neighbours, new or old; the new item's own row is the given one."""
    new = Neighbours(np.array([[2, 0]], np.int32), np.array([[0.3, 0.1]], np.float32))

    table = extended(OLD, PLACES, 4, new, both_ways=True)

    assert table.neighbours_VN.tolist() == [[2, 1], [2, 0], [0, 1], [2, 0]]
    assert extended(OLD, PLACES, 4, new).neighbours_VN[2].tolist() == [0, 3]


def test_many_new_items_join_rows_as_if_each_row_were_sorted() -> None:
    """Of equal figures the earlier neighbour stays."""
    rng, num_old, num = np.random.default_rng(0), 20, 4
    old = SimilarTable(
        np.stack([rng.choice(num_old, num, replace=False) for _ in range(num_old)]).astype(np.int32),
        -np.sort(-rng.integers(1, 9, (num_old, num)) / 8, axis=1).astype(np.float16),
    )
    places = np.arange(num_old)
    near = np.stack([rng.choice(50, num, replace=False) for _ in range(30)]).astype(np.int32)
    figures = -np.sort(-rng.integers(1, 9, (30, num)) / 8, axis=1).astype(np.float32)

    table = extended(old, places, 50, Neighbours(near, figures), both_ways=True)

    for item in range(num_old):
        row = [*zip(old.neighbours_VN[item].tolist(), old.scores_VN[item].tolist(), strict=True)]
        row += [(20 + new, float(figures[new, at])) for new, at in np.argwhere(near == item).tolist()]
        best = sorted(row, key=lambda pair: -pair[1])[:num]
        assert [*zip(table.neighbours_VN[item].tolist(), table.scores_VN[item].tolist(), strict=True)] == best
