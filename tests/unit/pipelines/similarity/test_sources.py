"""How a source reads a history: chosen on validation cases."""

import numpy as np

from models.similar import SimilarTable
from pipelines.data.examples import Cases
from pipelines.evaluation.gain import MIN_CASES
from pipelines.similarity.sources import _read_best

NUM_ITEMS, NUM_CASES = 40, 2 * MIN_CASES
TABLE = SimilarTable(((np.arange(NUM_ITEMS)[:, None] + 1) % NUM_ITEMS).astype(np.int32), np.ones((NUM_ITEMS, 1), "f2"))
"""Each item's only neighbour is the next item."""


def cases(position: int, num: int = NUM_CASES) -> Cases:
    """Draw histories of ten even items, whose label is the neighbour of the item at this position."""
    draw = np.random.default_rng(0)
    histories = [2 * draw.permutation(NUM_ITEMS // 2)[:20] for _ in range(num)]
    targets = np.array([(history[position] + 1) % NUM_ITEMS for history in histories])
    return Cases(("u",) * num, tuple(histories), targets, np.full(num, np.nan))


def test_a_source_reads_further_back_only_where_that_is_shown_to_rank_better() -> None:
    """Labels after the newest item keep the default; labels after the eighth item need a longer reading."""
    newest, older = (_read_best(TABLE, cases(position), repeats=False) for position in (-1, -8))

    assert (newest.newest, newest.decay) == (5, 0.5)
    assert (older.newest, older.decay) == (10, 0.85)


def test_too_few_cases_keep_the_default_reading() -> None:
    """Fewer cases than the mixer needs choose nothing."""
    source = _read_best(TABLE, cases(-8, MIN_CASES - 1), repeats=False)

    assert (source.newest, source.decay) == (5, 0.5)
