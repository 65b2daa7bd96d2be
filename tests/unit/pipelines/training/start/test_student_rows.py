"""The student's rows of items without events."""

import numpy as np
import pytest
import torch

from models.student import StudentConfig, StudentModel
from pipelines.codes.embedding import fit_text
from pipelines.training.start.student_rows import fill_rows_from_texts

_KINDS, _TRAITS = ("shampoo", "lipstick", "perfume", "cream"), ("dry", "oil", "night", "day", "rose", "mint", "gel")
_WORDS = (*_KINDS, *_TRAITS)
_NUM_ITEMS = 45


def _texts() -> list[str]:
    """Return texts of four words each, so that no two cosines are equal."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(_WORDS, 4, replace=False)) for _ in range(_NUM_ITEMS)]


def _student() -> StudentModel:
    torch.manual_seed(0)
    config = StudentConfig(
        num_items=_NUM_ITEMS, hidden_size=8, feed_forward=8, num_heads=2, num_hops=1, max_items=4, norm_eps=1e-5
    )
    return StudentModel(config)


def test_a_new_item_has_the_mean_row_of_the_ten_nearest_texts() -> None:
    """The rows equal a slow mean by softmax of cosines over .1; rows of other items and of the beginning stay."""
    student, texts, unused = _student(), _texts(), np.array([3, 40])
    before = student.embedding.weight.detach().clone()

    fill_rows_from_texts(student, texts, unused)

    after = student.embedding.weight.detach()
    vectors = fit_text(texts, 256, seed=0).encode(texts)
    kept = np.setdiff1d(np.arange(_NUM_ITEMS), unused)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1 + kept], before[1 + kept])
    for item in unused:
        cosines = {other: float(vectors[item] @ vectors[other]) for other in kept}
        nearest = sorted(kept, key=lambda other: -cosines[other])[:10]
        shares = np.exp([(cosines[other] - 1) / 0.1 for other in nearest])
        expected = sum(share * before[1 + other] for share, other in zip(shares / shares.sum(), nearest, strict=True))
        torch.testing.assert_close(after[1 + item], expected.float(), atol=1e-5, rtol=1e-4)


def test_a_text_of_unknown_words_has_a_row_of_zeros() -> None:
    """Such an item is like no other: its logit is 0 for every history, not that of a random row."""
    student, texts = _student(), [*_texts()[:-1], ""]

    fill_rows_from_texts(student, texts, np.array([_NUM_ITEMS - 1]))

    assert not student.head_weight_VD[-1].any()


@pytest.mark.parametrize("unused", [np.array([], dtype=int), np.arange(_NUM_ITEMS - 5)])
def test_rows_stay_without_new_items_and_with_too_few_known_ones(unused: np.ndarray) -> None:
    """Nothing to fill, or fewer than ten items to fill from."""
    student = _student()
    before = student.embedding.weight.detach().clone()

    fill_rows_from_texts(student, _texts(), unused)

    assert torch.equal(student.embedding.weight, before)
