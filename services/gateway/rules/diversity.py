"""Diversity: maximal marginal relevance (Carbonell and Goldstein, 1998) by the items' vectors.

The next item is the one with the largest  (1 - d) * relevance - d * max(cosine with those before it)  where relevance is the score, scaled to
0 to 1 over the candidates, and the maximum over none is 0; ties go to the candidate that comes first. An item without a vector is like no other.
"""

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

MAX_PLACES = 100
"""The first places are chosen so; those after them stay in the order of their scores: nobody looks that far for variety."""


def diversify(slate: Slate, rules: Rules, known: Known) -> Slate:
    """Reorder the candidates. With caps twice as many places are chosen, since caps pass over some."""
    weight, num_candidates = rules.diversity or 0.0, len(slate.indices)
    num_places = min(MAX_PLACES, num_candidates, slate.num_free * (2 if rules.caps else 1))
    vectors = known.vectors(slate.indices) if num_places > 1 and weight else None
    if vectors is None:
        return slate
    relevant = ((1.0 - weight) * relevance(slate.scores)).astype(np.float32)
    unlike, best = np.float32(-weight) * vectors, int(relevant.argmax())
    value, chosen = unlike @ vectors[best] + relevant, [best]
    value[best] = -np.inf
    beside = np.empty_like(value)
    for _ in range(num_places - 1):
        best = int(value.argmax())
        chosen.append(best)
        np.dot(unlike, vectors[best], out=beside)
        np.minimum(value, np.add(beside, relevant, out=beside), out=value)
        value[best] = -np.inf
    return slate.reordered(np.concatenate((chosen, np.flatnonzero(value > -np.inf))))


def relevance(scores: np.ndarray) -> np.ndarray:
    """Scale scores to 0 to 1; equal ones are all 1."""
    least, span = scores.min(), np.ptp(scores)
    scaled: np.ndarray = (scores - least) / span if span > 0 else np.ones(len(scores))
    return scaled
