"""Diversity: maximal marginal relevance (Carbonell and Goldstein, 1998) by the items' vectors.

The next item is the one with the largest  (1 - d) * relevance - d * max(cosine with those before it)  where relevance is the score, scaled to
0 to 1 over the candidates, and the maximum over none is 0; ties go to the candidate that comes first. An item without a vector is like no other.
"""

from collections.abc import Iterator

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

MAX_PLACES = 100
"""So many places are chosen so at most, and twice as many as the list has free, since caps pass over some; those after them stay in the order of their scores."""


def diversify(slate: Slate, order: Iterator[int], rules: Rules, known: Known) -> Iterator[int]:
    """Yield the candidates' places in the new order, each computed when it is asked for."""
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
    """Scale scores, highest first, to 0 to 1; equal ones are all 1."""
    highest, least = scores[0], scores[-1]
    scaled: np.ndarray = (scores - least) / (highest - least) if highest > least else np.ones(len(scores))
    return scaled
