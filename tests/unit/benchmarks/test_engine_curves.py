"""The curves' figures and their random catalogues."""

import numpy as np
import pytest

from benchmarks.engine_curves.__main__ import flatness
from benchmarks.engine_curves.engines import RankingRunner, build_engine, random_decoder, random_items


def test_flatness_is_the_highest_over_the_lowest_cost_by_state() -> None:
    """Each state has its own ratio."""
    rows = [{"state": "cold", "ms": 4.0}, {"state": "warm", "ms": 1.0}, {"state": "cold", "ms": 5.0}]

    assert flatness(rows, "ms") == {"cold": 1.25, "warm": 1.0}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_catalogues_of_any_depth_lie_in_their_code_space(depth) -> None:
    """Codes are below their level's size; at depth 1 each item has its own."""
    items = random_items(500, depth, skew=3.0)

    assert items.codes.shape == (500, depth)
    assert (items.codes < np.array(items.level_sizes)).all()
    assert depth > 1 or len(np.unique(items.codes)) == 500


def test_a_ranking_is_timed_from_request_to_answer() -> None:
    """A runner measures milliseconds and frees its blocks."""
    items = random_items(300, 3)
    caller = RankingRunner(build_engine(random_decoder(769), items), items, np.random.default_rng(0))
    history = caller.history(40)

    taken = [caller.rank(history) for _ in range(2)]

    assert all(one.ms > 0 and one.cpu_ms > 0 for one in taken)
    assert caller.engine.load().kv_cache_usage == 0
