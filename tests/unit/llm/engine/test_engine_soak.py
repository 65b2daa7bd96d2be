"""Many random requests with cancels and deadlines: each ends once, and no block is lost."""

import numpy as np
import pytest

from models.decoder.window import Window
from services.errors import Overloaded
from services.llm.engine.outcome import Status


@pytest.mark.parametrize(
    ("depth", "num_requests", "window"),
    [
        (2, 500, Window(5, frozenset({0}), 2)),
        pytest.param(3, 10_000, None, marks=pytest.mark.grid),
    ],
)
def test_free_and_cached_make_the_total_after_a_soak(
    depth, num_requests, window, items_of, decoder_of, engine_of
) -> None:
    """Rankings and texts are added, cancelled at random points or late; in the end all blocks are free."""
    items = items_of(depth)
    decoder = decoder_of(items, layers=1, window=window)
    engine = engine_of(decoder, items, num_blocks=40, max_waiting=4, max_running=3)
    rng = np.random.default_rng(depth)
    added, statuses = [], {}
    now_s = 0.0

    for index in range(num_requests):
        now_s += 1.0
        prompt = [0, *rng.integers(1, 4, rng.integers(1, 50)).tolist()]
        deadline_s = now_s + rng.integers(1, 30) if rng.random() < 0.3 else None
        try:
            if rng.random() < 0.6:
                mask = rng.random(50) < 0.5
                engine.add_rank(str(index), prompt, k=4, allowed=mask, now_s=now_s, deadline_s=deadline_s)
            else:
                engine.add_text(str(index), prompt, max_new_tokens=4, now_s=now_s, deadline_s=deadline_s)
            added.append(str(index))
        except Overloaded:
            statuses[str(index)] = "refused"
        if rng.random() < 0.2 and added:
            engine.cancel(str(rng.choice(added[-8:])))
        if rng.random() < 0.7:
            statuses |= {outcome.request_id: outcome.status for outcome in engine.step(now_s)}
            engine.check_integrity()
    while engine.has_work:
        statuses |= {outcome.request_id: outcome.status for outcome in engine.step(now_s)}

    assert statuses.keys() == {str(index) for index in range(num_requests)}
    assert set(statuses.values()) == {*Status, "refused"}
    pool = engine._scheduler.pool
    num_blank = len(pool._blank)
    assert pool.num_free == num_blank + pool.num_cached == pool.num_blocks
    assert engine.load().kv_cache_usage == 0


def test_a_cancel_frees_blocks_at_once(items_of, decoder_of, engine_of) -> None:
    """A cancelled request holds no block, and its outcome comes from the next step."""
    items = items_of(1)
    engine = engine_of(decoder_of(items), items, max_chunk_tokens=4)
    engine.add_rank("a", [0] * 20, k=3, allowed=np.ones(50, dtype=bool))
    engine.step(0.0)
    held = engine.load().kv_cache_usage

    cancelled = engine.cancel("a")

    assert held > 0
    assert cancelled
    assert engine.load().kv_cache_usage == 0
    assert [outcome.status for outcome in engine.step(0.0)] == [Status.CANCELLED]
    assert not engine.cancel("a")
