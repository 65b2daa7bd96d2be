"""Freshness: an item published now counts as `factor` times as likely.

The excess over 1 halves every `half_life_h` hours.
Items without `published_ms` keep their score; items published in the future count as new.
"""

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

PUBLISHED = "published_ms"
_HOUR_MS = 3_600_000.0
_LONG_AGO = -1e9
"""In half-lives: the excess is zero."""


def freshen(slate: Slate, rules: Rules, known: Known) -> np.ndarray | None:
    """Return the candidates' factors (n,); None if no item has a publication time."""
    column, rule = known.expressions.columns.numbers.get(PUBLISHED), rules.freshness
    if column is None or rule is None:
        return None
    half_lives = (column.numbers[slate.indices] - known.now_ms) / (rule.half_life_h * _HOUR_MS)
    half_lives = np.minimum(0.0, np.fmax(half_lives, _LONG_AGO))  # fmax: without a time, as if long ago
    factors: np.ndarray = 1.0 + (rule.factor - 1.0) * np.exp2(half_lives)
    return factors
