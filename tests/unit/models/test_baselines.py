"""The evaluation's baselines against slow oracles."""

import numpy as np
import pytest

from models.baselines import Bigram, ItemKnn

SEQUENCES = [np.array(items) for items in ([0, 1, 2, 1], [0, 1, 3], [4, 1, 2])]
NUM_ITEMS = 6


def test_bigram_counts_what_followed_the_newest_item() -> None:
    """Item 1 was followed by 2 twice and by 3 once; other items and an empty history are ranked by popularity."""
    scores, unknown = Bigram(SEQUENCES, NUM_ITEMS)([np.array([4, 1]), np.array([], dtype=np.int64)])

    assert np.argsort(-scores, kind="stable").tolist() == [2, 3, 1, 0, 4, 5]
    assert scores[2] == pytest.approx(2, abs=0.5)
    assert unknown.argmax() == 1


@pytest.mark.parametrize(("num_items", "kept"), [(NUM_ITEMS, 1 << 27), (NUM_ITEMS, 0), (200, 1 << 27), (200, 200)])
def test_item_knn_is_the_decayed_sum_of_cosines(num_items: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Item kNN equals a dense oracle: column cosines of the user-item matrix with a zero diagonal.

    This also holds for a mostly dissimilar catalogue, for every neighbour limit, and for an item that nobody used.
    """
    monkeypatch.setattr("models.baselines._KEPT_NUMBERS", kept)
    held = np.zeros((3, num_items))
    for user, sequence in enumerate(SEQUENCES):
        held[user, sequence] = 1
    norm = np.sqrt(np.maximum(held.sum(0), 1))
    cosine = held.T @ held / np.outer(norm, norm)
    np.fill_diagonal(cosine, 0)

    scores = ItemKnn(SEQUENCES, num_items, newest=2, decay=0.8)([np.array([4, 0, 1]), np.array([5]), np.array([0, 1])])

    expected = cosine[1] + 0.8 * cosine[0]
    np.testing.assert_allclose(scores, [expected, np.zeros(num_items), expected])
