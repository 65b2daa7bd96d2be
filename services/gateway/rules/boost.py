"""Boosts: matching items count as `factor` times as likely (less likely below 1). Several factors multiply."""

from functools import reduce

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate


def boost(slate: Slate, rules: Rules, known: Known) -> np.ndarray:
    """Return the candidates' factors (n,)."""
    each = (np.where(known.expressions.mask(one.where)[slate.indices], one.factor, 1.0) for one in rules.boosts or ())
    return reduce(np.multiply, each)
