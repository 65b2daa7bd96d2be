"""Diversity: maximal marginal relevance (Carbonell and Goldstein, 1998) over the items' vectors.

The next item maximizes  (1 - d) * relevance - d * max(cosine with the items before it). Relevance is the score scaled
to 0 to 1 over the candidates; the maximum over no items is 0; ties go to the earlier candidate. An item without a
vector is similar to no other item.
"""

from collections.abc import Iterator

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

MAX_PLACES = 100
"""Maximum positions chosen by diversity, also limited to twice the free positions since caps skip some; later
candidates stay in score order."""


def diversify(slate: Slate, order: Iterator[int], rules: Rules, known: Known) -> Iterator[int]:
    """Yield the candidates' ranks in the new order, computed lazily."""
    weight = rules.diversity or 0.0
    vectors = known.vectors(slate.indices) if len(slate.indices) > 1 and weight else None
    if vectors is None:
        yield from order
        return
    relevant = ((1.0 - weight) * relevance(slate.scores)).astype(np.float32)
    unlike, best = np.float32(-weight) * vectors, 0
    value, beside = np.full_like(relevant, np.inf), np.empty_like(relevant)
    for _ in range(min(MAX_PLACES, len(relevant), 2 * slate.num_free)):
        yield best
        np.dot(unlike, vectors[best], out=beside)
        np.minimum(value, np.add(beside, relevant, out=beside), out=value)
        value[best] = -np.inf
        best = int(value.argmax())
    yield from np.flatnonzero(value > -np.inf).tolist()


def relevance(scores: np.ndarray) -> np.ndarray:
    """Scale scores, highest first, to 0 to 1; equal scores all become 1."""
    highest, least = scores[0], scores[-1]
    scaled: np.ndarray = (scores - least) / (highest - least) if highest > least else np.ones(len(scores))
    return scaled
