"""Decay: an item counts as `decay` times as likely after each time that it was shown to this user and not clicked."""

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

_MAX_TIMES = 100
"""More than this changes no order that anybody would see, and keeps the factor above zero."""


def decay(slate: Slate, rules: Rules, known: Known) -> np.ndarray | None:
    """Return the candidates' factors (n,); None where nothing was shown."""
    if rules.decay is None or not known.shown:
        return None
    times_of = dict(zip(map(known.index, known.shown), known.shown.values(), strict=True))
    times = (times_of.get(index, 0) for index in slate.indices.tolist())
    return np.array([rules.decay ** min(_MAX_TIMES, one) if one else 1.0 for one in times])
