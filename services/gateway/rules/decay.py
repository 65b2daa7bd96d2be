"""Decay: an item counts as `decay` times as likely for each impression to this user without a click."""

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

_MAX_TIMES = 100
"""More impressions do not change the order visibly; the limit keeps the factor above zero."""


def decay(slate: Slate, rules: Rules, known: Known) -> np.ndarray | None:
    """Return the candidates' factors (n,); None without impressions."""
    if rules.decay is None or not known.shown:
        return None
    factor_of = {known.index(item_id): rules.decay ** min(_MAX_TIMES, times) for item_id, times in known.shown.items()}
    return np.array([factor_of.get(index, 1.0) for index in slate.indices.tolist()])
