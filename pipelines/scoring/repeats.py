"""Decides before training whether users repeat items: a bigram ranks validation labels, masked and unmasked.

The fraction of labels that repeat is not enough. A mask loses these labels and lifts every other label above the seen
items; which effect is larger depends on how predictable repeats are. The bigram, which needs no training, measures
both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models.baselines import Bigram
from pipelines.data.examples import Cases, sample_cases
from pipelines.scoring.metrics import ndcg, rank_labels

_NUM_CASES = 10_000
"""A user takes 8 ms where there are 10^6 items."""


def find_repeats(sequences: Sequence[np.ndarray], valid: Cases, num_items: int) -> dict[str, Any]:
    """Return {repeats: whether seen items stay in training and answers, masked_ndcg10, unmasked_ndcg10 of the bigram}.

    Without repeated labels a mask cannot lose: nothing is ranked, and both values are None.
    """
    cases = sample_cases(valid, _NUM_CASES)
    if not any((history == target).any() for history, target in zip(cases.histories, cases.targets, strict=True)):
        return {"repeats": False, "masked_ndcg10": None, "unmasked_ndcg10": None}
    ranks = rank_labels(Bigram(sequences, num_items), cases)
    masked, unmasked = ndcg(ranks.masked, 10), ndcg(ranks.unmasked, 10)
    return {"repeats": unmasked > masked, "masked_ndcg10": masked, "unmasked_ndcg10": unmasked}


def describe_repeats(about: Mapping[str, Any]) -> str:
    """Return a sentence: whether seen items are masked, and why."""
    seen = "are learned and may be recommended again" if about["repeats"] else "are excluded"
    if about["masked_ndcg10"] is None:
        return f"seen items {seen}: no validation label repeats its user's history"
    compared = f"{about['masked_ndcg10']:.4f} without them and {about['unmasked_ndcg10']:.4f} with them"
    return f"seen items {seen}: the bigram's NDCG@10 on validation labels is {compared}"
