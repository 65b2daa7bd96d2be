"""Diversity: maximal marginal relevance (Carbonell and Goldstein, 1998) over the items' vectors.

The next item maximizes  (1 - d) * relevance - d * max(cosine with the items before it). Relevance is the score scaled
to 0 to 1 over the compared candidates; the maximum over no items is 0; ties go to the earlier candidate. An item
without a vector is similar to no other item.
"""

from collections.abc import Iterator

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

MAX_PLACES = 100
"""Maximum positions chosen by diversity, also limited to twice the free positions since caps skip some; later
candidates stay in score order."""
MAX_COMPARED = 10 * MAX_PLACES
"""Only this many leading candidates are compared: a list of thousands would hold the event loop for tens of ms."""


def diversify(slate: Slate, order: Iterator[int], rules: Rules, known: Known) -> Iterator[int]:
    """Yield the candidates' ranks in the new order, computed lazily."""
    weight = rules.diversity or 0.0
    leading = slate.indices[:MAX_COMPARED]
    vectors = known.vectors(leading) if len(leading) > 1 and weight else None
    if vectors is None:
        yield from order
        return
    relevant = ((1.0 - weight) * relevance(slate.scores[:MAX_COMPARED])).astype(np.float32)
    unlike, best = np.float32(-weight) * vectors, 0
    yield best
    value = unlike.dot(vectors[best]) + relevant
    beside = np.empty_like(value)
    for _ in range(min(MAX_PLACES, len(relevant), 2 * slate.num_free) - 1):
        value[best] = -np.inf
        best = int(value.argmax())
        yield best
        unlike.dot(vectors[best], beside)
        np.minimum(value, np.add(beside, relevant, out=beside), out=value)
    value[best] = -np.inf
    yield from np.flatnonzero(value > -np.inf).tolist()
    yield from range(len(leading), len(slate.indices))


def relevance(scores: np.ndarray) -> np.ndarray:
    """Scale scores, highest first, to 0 to 1; equal scores all become 1."""
    highest, least = scores.item(0), scores.item(-1)
    scaled: np.ndarray = (scores - least) / (highest - least) if highest > least else np.ones(len(scores))
    return scaled
