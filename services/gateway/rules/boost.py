"""Boosts: matching items count as `factor` times as likely (less likely below 1). Several factors multiply."""

from functools import reduce

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate


def boost(slate: Slate, rules: Rules, known: Known) -> np.ndarray:
    """Return the candidates' factors (n,)."""
    factors = (
        np.where(known.expressions.mask(rule.where)[slate.indices], rule.factor, 1.0) for rule in rules.boosts or ()
    )
    return reduce(np.multiply, factors)
