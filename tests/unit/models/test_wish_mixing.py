"""The mix of a reader's scores with the rankings of tiers."""

import math

import numpy as np
import pytest

from models.wishes.mixing import WishMix, wish_mix_of
from models.wishes.reading import Reading, ReadTerms


def test_an_item_that_fits_a_wish_passes_items_that_a_tier_ranked() -> None:
    """The reader moves the best-fitting item up, although no tier ranked it; the tier decides between equal fits."""
    ranked = [(np.array([0, 1]), np.array([0.6, 0.4]))]
    reading = Reading(ReadTerms(), np.log(np.array([0.01, 0.01, 0.97, 0.01], dtype=np.float32)))

    scores_V = WishMix(weight=2.0, floor=0.1).scores(ranked, reading, 4)

    assert np.argsort(-scores_V).tolist() == [2, 0, 1, 3]


def test_lower_tiers_and_all_items_count_by_the_floor() -> None:
    """Without a reading, the probabilities of all items sum to 1."""
    ranked = [(np.array([0]), np.array([1.0])), (np.array([1]), np.array([1.0]))]

    scores_V = WishMix(floor=0.2).scores(ranked, None, 4)

    assert np.exp(scores_V) == pytest.approx([0.8 / 1.2 + 0.05, 0.16 / 1.2 + 0.05, 0.05, 0.05], rel=1e-5)
    assert math.isclose(float(np.exp(scores_V).sum()), 1.0, rel_tol=1e-5)


def test_an_item_that_the_reader_does_not_know_fits_least() -> None:
    """Items beyond the reader's scores count as its least fitting item."""
    scores_V = WishMix().scores([], Reading(ReadTerms(), np.array([-1.0, -3.0], dtype=np.float32)), 3)

    assert scores_V[1] == scores_V[2]


def test_the_weights_come_from_the_manifest() -> None:
    """Validation chose them with the bundle; an older bundle has the defaults."""
    assert wish_mix_of({"wishes": {"weight": 3, "floor": 0.5}}) == WishMix(weight=3.0, floor=0.5)
    assert wish_mix_of({}) == WishMix()
