"""A metric of one variant as sums over its users, the independent units: only events of one user are dependent.

Pure; numpy only.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class UserSums:
    """Sums over users of a metric's `total` (clicks, ms) and `exposure` (lists shown), their squares and their product.

    The mean is all totals over all exposures; its variance is that of a ratio by the delta method, by users. Sums of
    different users add up.
    """

    num_users: int = 0
    total: float = 0.0
    exposure: float = 0.0
    total_squared: float = 0.0
    product: float = 0.0
    exposure_squared: float = 0.0

    @classmethod
    def of(cls, totals: np.ndarray, exposures: np.ndarray) -> Self:
        """Return the sums of users, each with one entry in both (float, the same length)."""
        return cls(
            len(totals),
            float(totals.sum()),
            float(exposures.sum()),
            float(totals @ totals),
            float(totals @ exposures),
            float(exposures @ exposures),
        )

    def __add__(self, other: Self) -> Self:
        return type(self)(
            self.num_users + other.num_users,
            self.total + other.total,
            self.exposure + other.exposure,
            self.total_squared + other.total_squared,
            self.product + other.product,
            self.exposure_squared + other.exposure_squared,
        )

    @property
    def mean(self) -> float:
        """The metric per unit of exposure; NaN without exposure."""
        return self.total / self.exposure if self.exposure else math.nan

    def spread(self, mean: float) -> float:
        """Return the variance of one user's total about `mean` times their exposure."""
        squares = self.total_squared - 2 * mean * self.product + mean**2 * self.exposure_squared
        return max(0.0, squares) / max(1, self.num_users - 1)

    @property
    def variance(self) -> float:
        """The variance of the mean; infinite for fewer than two users."""
        if self.num_users < 2 or not self.exposure:
            return math.inf
        return self.num_users * self.spread(self.mean) / self.exposure**2


def difference_variance(candidate: UserSums, control: UserSums, factor: float = 1.0) -> float:
    """Return the variance of the candidate's mean minus `factor` times the control's.

    It is the larger of two estimates: with separate spreads, and with a pooled spread. A small variant with few events
    by chance has a small spread by chance; with its own spread it would be found worse too often.
    """
    both = candidate + control
    if min(candidate.num_users, control.num_users) < 2 or not candidate.exposure or not control.exposure:
        return math.inf
    spread = both.spread(both.mean)
    same = spread * (candidate.num_users / candidate.exposure**2 + factor**2 * control.num_users / control.exposure**2)
    return max(same, candidate.variance + factor**2 * control.variance)
