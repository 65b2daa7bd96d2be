"""Coverage and calibration of lists, against slow implementations and at their extremes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluation.gain import SHELVES
from pipelines.evaluation.variety import ListedScorer, best_items

SHELF_OF = np.arange(40) % 4


def slow_summary(scores: np.ndarray, histories: list[np.ndarray], *, repeats: bool) -> tuple[float, float]:
    """Compute coverage and calibration in plain loops."""
    shown: set[int] = set()
    divergences = []
    for row, history in zip(scores, histories, strict=True):
        allowed = [item for item in range(len(row)) if repeats or item not in history]
        listed = sorted(allowed, key=lambda item: -row[item])[:10]
        shown.update(listed)
        total = 0.0
        for shelf in range(4):
            p = sum(SHELF_OF[item] == shelf for item in history) / max(1, len(history))
            q = sum(SHELF_OF[item] == shelf for item in listed) / max(1, len(listed))
            total += p * math.log(p / (0.99 * q + 0.01 * p)) if p else 0.0
        divergences.append(total)
    return len(shown) / scores.shape[1], sum(divergences) / len(divergences)


@given(seed=st.integers(0, 1_000), repeats=st.booleans())
def test_coverage_and_calibration_are_those_of_plain_loops(seed: int, *, repeats: bool) -> None:
    """The figures equal the plain loops' for any scores and histories, including empty histories."""
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, 40, rng.integers(0, 25)) for _ in range(6)]
    scores = rng.normal(size=(6, 40))
    scorer = ListedScorer(lambda histories: scores[:3] if len(histories) == 3 else scores, SHELF_OF, repeats=repeats)

    passed_on = scorer(histories)
    summary = scorer.summary()

    assert passed_on is scores
    plain = slow_summary(scores, histories, repeats=repeats)
    assert (summary["coverage@10"], summary["calibration@10"]) == pytest.approx(plain)
    assert 0 <= summary["calibration@10"] <= math.log(100)


def test_a_list_of_the_users_own_mix_is_calibrated_and_one_of_the_head_is_not() -> None:
    """For a tail history, a list of tail items has divergence 0 and a list of head items the maximum."""
    tail, head = (np.isin(SHELF_OF, SHELVES.index(name)) for name in ("tail", "head"))
    history = np.flatnonzero(tail)[:4]

    own, popular = (
        ListedScorer(lambda _, liked=liked: liked[None].astype(float), SHELF_OF, repeats=True) for liked in (tail, head)
    )
    own([history]), popular([history])

    assert own.summary()["calibration@10"] == pytest.approx(0)
    assert popular.summary()["calibration@10"] == pytest.approx(math.log(100))
    assert popular.summary()["shares"]["lists"] == {"head": 1, "torso": 0, "tail": 0, "new": 0}
    assert popular.summary()["shares"]["histories"]["tail"] == 1


@pytest.mark.parametrize("num_items", [1, 9, 10, 11, 97, 100, 1_003])
def test_lists_hold_the_highest_of_any_catalogue(num_items: int) -> None:
    """A list holds the ten highest allowed items, or all of them if fewer, with or without ties."""
    rng = np.random.default_rng(num_items)
    for scores in (
        rng.permutation(num_items),
        rng.integers(0, 3, num_items),
        np.arange(num_items),
        np.zeros(num_items),
    ):
        excluded = rng.integers(0, num_items, 3)
        allowed = np.delete(scores, excluded)

        listed = best_items(scores.astype(float), excluded)

        assert sorted(scores[listed]) == sorted(allowed)[-10:]
        assert len(np.unique(listed)) == len(listed)
        assert not np.isin(listed, excluded).any()


def test_a_list_holds_what_has_a_score_and_may_be_shown() -> None:
    """Excluded items and items without a finite score are never listed; a small catalogue gives a short list."""
    scores = np.array([5.0, np.nan, -np.inf, 1.0, 2.0])

    assert sorted(best_items(scores, [0])) == [3, 4]
    assert best_items(np.full(30, -np.inf), ()).size == 0
