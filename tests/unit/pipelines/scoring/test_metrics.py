"""Ranking metrics against values calculated by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.examples import Cases
from pipelines.scoring.metrics import gains, hit_rate, interval, mean_ranks, ndcg, rank_labels

SCORES = st.one_of(st.integers(-2, 3).map(float), st.sampled_from([np.nan, -np.inf]))


@given(scores=st.lists(SCORES, min_size=1, max_size=12), data=st.data())
def test_ranks_are_those_of_comparing_each_with_each(scores: list[float], data: st.DataObject) -> None:
    """Ranks equal pairwise comparison: ties get the mean position, and NaN ranks below all scores."""
    item = st.integers(0, len(scores) - 1)
    target, history = data.draw(item), data.draw(st.lists(item))

    def slow(seen: list[int]) -> float:
        known = [-np.inf if np.isnan(score) or index in seen else score for index, score in enumerate(scores)]
        above, tied = (sum(is_so(score, known[target]) for score in known) for is_so in (float.__gt__, float.__eq__))
        return above + (tied + 1) / 2

    ranks = mean_ranks(np.array(scores), target, np.array(history, dtype=np.int64))

    assert ranks == (slow([]), slow(history))


def test_the_bootstrap_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval does not depend on the number of draws in memory."""
    values = np.random.default_rng(1).random(101)
    whole = interval(values, seed=0)
    monkeypatch.setattr("pipelines.scoring.metrics._DRAWN_AT_ONCE", 700)

    assert interval(values, seed=0) == whole


def test_metrics_of_known_ranks() -> None:
    """Rank 10 of ten is a hit, a mean rank of 10.5 is not."""
    ranks, last, beyond = np.array([1.0, 3.0, 20.0]), np.array([10.0]), np.array([10.5])

    assert hit_rate(ranks, 10) == pytest.approx(2 / 3)
    assert ndcg(ranks, 10) == pytest.approx(1.5 / 3)
    assert gains(ranks, 2).tolist() == [1.0, 0.0, 0.0]
    assert (hit_rate(last, 10), hit_rate(beyond, 10)) == (1.0, 0.0)
    assert (ndcg(last, 10), ndcg(beyond, 10)) == (pytest.approx(1 / np.log2(11)), 0.0)


def test_masking_removes_the_history_and_only_the_history() -> None:
    """Masking removes seen items above the label; a label that repeats the history is always missed."""
    cases = Cases(("u", "v"), (np.array([0, 1]), np.array([2])), np.array([2, 2]), np.zeros(2))

    ranks = rank_labels(lambda histories: np.tile([9.0, 8.0, 7.0, 6.0], (len(histories), 1)), cases)

    assert ranks.unmasked.tolist() == [3.0, 3.0]
    assert ranks.masked.tolist() == [1.0, 4.0]
