"""The curves' figures and their random catalogues."""

import numpy as np

from benchmarks.engine_curves import RankingRunner, build_engine, random_decoder, random_items


def test_a_ranking_is_timed_from_request_to_answer() -> None:
    """A runner measures milliseconds and frees its blocks."""
    items = random_items(300, 3)
    caller = RankingRunner(build_engine(random_decoder(769), items), items, np.random.default_rng(0))
    history = caller.history(40)

    taken = [caller.rank(history) for _ in range(2)]

    assert all(one.ms > 0 and one.cpu_ms > 0 for one in taken)
    assert caller.engine.load().kv_cache_usage == 0
