"""Boosts: items for which an expression holds count as `factor` times as likely, or as unlikely below 1. Several factors multiply."""

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate


def boost(slate: Slate, rules: Rules, known: Known) -> np.ndarray:
    """Return the candidates' factors (n,)."""
    factors = np.ones(len(slate.indices))
    for one in rules.boosts or ():
        factors[known.expressions.mask(one.where)[slate.indices]] *= one.factor
    return factors
