"""Seen items are excluded if that scores better, regardless of how many labels repeat."""

import numpy as np
import pytest

from pipelines.data.examples import Cases
from pipelines.scoring.repeats import describe_repeats, find_repeats

NUM_ITEMS = 100


def cases(histories: list[list[int]], targets: list[int]) -> Cases:
    """Build validation cases of these users."""
    users = tuple(f"u{number}" for number in range(len(targets)))
    return Cases(users, tuple(map(np.array, histories)), np.array(targets), np.full(len(targets), np.nan))


def test_few_repeats_that_are_predicted_well_are_learned() -> None:
    """Masks lose the single predictable repeat among twenty labels and improve no other label."""
    sequences = [np.array([1, 2, 1])] * 3
    histories, targets = [[1, 2], *([[50 + user, 70 + user] for user in range(19)])], [1, *range(3, 22)]

    comparison = find_repeats(sequences, cases(histories, targets), NUM_ITEMS)

    assert comparison == {"repeats": True, "masked_ndcg10": 0.0, "unmasked_ndcg10": pytest.approx(1 / 20)}
    text = describe_repeats(comparison)
    assert "learned and may be recommended again: " in text
    assert "0.0000 without them and 0.0500" in text


def test_many_repeats_that_nothing_predicts_are_left_out() -> None:
    """Repeats that rank low are worth less than the labels that masks lift."""
    sequences = [np.array([0, 1, 2, 1])] * 2 + [np.array([9, 2, 3])]
    histories, targets = [[30, 1, 2], [31, 1, 2], [32, 1, 2], [33, 1, 2]], [30, 3, 3, 3]

    comparison = find_repeats(sequences, cases(histories, targets), NUM_ITEMS)

    assert comparison["repeats"] is False
    assert comparison["masked_ndcg10"] == pytest.approx(3 / 4)
    assert 0 < comparison["unmasked_ndcg10"] < comparison["masked_ndcg10"]


@pytest.mark.parametrize(("histories", "targets"), [([[1, 2], [3, 4]], [3, 1]), ([], [])])
def test_without_a_repeat_nothing_is_ranked(histories: list[list[int]], targets: list[int]) -> None:
    """Without repeated labels masks can only help, so no ranking is needed."""
    comparison = find_repeats([np.array([1, 2])], cases(histories, targets), NUM_ITEMS)

    assert comparison == {"repeats": False, "masked_ndcg10": None, "unmasked_ndcg10": None}
    assert describe_repeats(comparison) == "seen items are excluded: no validation label repeats its user's history"
