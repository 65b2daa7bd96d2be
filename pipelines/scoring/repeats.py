"""Whether users come back to items, found before any training: the bigram ranks validation labels among all items, with those of the history and without.

A share of labels that repeat would not do. Masks lose all of these and lift every other label by the seen items above it; which weighs more depends on how well a repeat is
predicted, and the bigram, which needs no training, has that difference on the same labels.
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
    """Return {repeats: whether seen items are learned, judged and shown like others, masked_ndcg10, unmasked_ndcg10: the bigram's on validation labels}.

    Where no label repeats, masks cannot lose: nothing is ranked, and both are None.
    """
    cases = sample_cases(valid, _NUM_CASES)
    if not any((history == target).any() for history, target in zip(cases.histories, cases.targets, strict=True)):
        return {"repeats": False, "masked_ndcg10": None, "unmasked_ndcg10": None}
    ranks = rank_labels(Bigram(sequences, num_items), cases)
    masked, unmasked = ndcg(ranks.masked, 10), ndcg(ranks.unmasked, 10)
    return {"repeats": unmasked > masked, "masked_ndcg10": masked, "unmasked_ndcg10": unmasked}


def describe_repeats(found: Mapping[str, Any]) -> str:
    """Return a sentence: whether seen items are left out, and why."""
    seen = "are learned and may be shown again" if found["repeats"] else "are left out"
    if found["masked_ndcg10"] is None:
        return f"seen items {seen}: no validation label repeats its user's history"
    compared = f"{found['masked_ndcg10']:.4f} without them and {found['unmasked_ndcg10']:.4f} with them"
    return f"seen items {seen}: the bigram's NDCG@10 on validation labels is {compared}"
