"""Freshness: an item published just now counts as `factor` times as likely, and what exceeds 1 halves every `half_life_h` hours.

An item without `published_ms` counts as before; one that is published in the future counts as new.
"""

import numpy as np

from services.contracts.rules import Rules
from services.gateway.rules.slate import Known, Slate

PUBLISHED = "published_ms"
_HOUR_MS = 3_600_000.0


def freshen(slate: Slate, rules: Rules, known: Known) -> np.ndarray | None:
    """Return the candidates' factors (n,); None where no item has a time."""
    column, rule = known.expressions.columns.numbers.get(PUBLISHED), rules.freshness
    if column is None or rule is None:
        return None
    age_h = np.maximum(0.0, known.now_ms - column.numbers[slate.indices]) / _HOUR_MS
    factors = 1.0 + (rule.factor - 1.0) * np.exp2(-age_h / rule.half_life_h)
    return np.where(np.isnan(factors), 1.0, factors)
