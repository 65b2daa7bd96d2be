"""Decay: an item counts as `decay` times as likely for each impression to this user without a click."""

from itertools import count

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

_MAX_TIMES = 100
"""More impressions do not change the order visibly; the limit keeps the factor above zero."""


def decay(slate: Slate, rules: Rules, known: Known) -> np.ndarray | None:
    """Return the candidates' factors (n,); None without impressions."""
    if rules.decay is None or not known.shown:
        return None
    factors, rank_of = np.ones(len(slate.indices)), dict(zip(slate.indices.tolist(), count(), strict=False))
    for index, times in zip(map(known.index, known.shown), known.shown.values(), strict=True):
        if index in rank_of:
            factors[rank_of[index]] = rules.decay ** min(_MAX_TIMES, times)
    return factors
