"""The count of invalid items: 0 in a short run across reloads, and wrong items are detected."""

from dataclasses import replace

import numpy as np

from benchmarks.engine.curves import RankingRunner, build_engine, random_decoder, random_items
from benchmarks.engine.validity import Count, Served, judged


def test_every_beam_is_a_valid_item() -> None:
    """Across reloads, depths, masks and widths, each ranking is complete and has only allowed, distinct items."""
    count = Count()

    assert sum(judged(8_000, count)) == count.beams

    assert count.beams >= 8_000
    assert count.catalogues >= 2
    assert (count.invalid, count.repeated, count.short) == (0, 0, 0)


def test_a_wrong_answer_is_counted_and_its_time_measured() -> None:
    """Forbidden items, repeated items and short lists are each counted."""
    items = random_items(30, 2)
    engine = build_engine(random_decoder(1 + 2 * 256), items)
    served, count, shown = Served(engine, items), Count(), np.ones(30, dtype=bool)
    engine.add_rank("a", [0], k=9, beam_width=16)
    (outcome,) = [outcome for _ in range(3) for outcome in engine.step(0.0)]
    shown[4] = False
    served.asked["a"] = shown, 9

    served.judge(replace(outcome, item_indices=np.array([4, 7, 7])), count)
    taken = RankingRunner(engine, items, np.random.default_rng(0)).rank(np.array([1, 2]), width=16)

    assert (count.invalid, count.repeated, count.short) == (1, 1, 1)
    assert taken.ms > 0
    assert taken.cpu_ms > 0
