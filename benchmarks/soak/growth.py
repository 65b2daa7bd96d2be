"""Growth: the slope of a measured quantity with its interval, against a bound. Pure.

Each process has a level of its own and one slope is fitted to all processes of a kind, so that a restart is no growth. Samples are
averaged over half a minute first: neighbouring ones are not independent, and the interval would be too narrow.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

BLOCK_S = 30.0
_HOUR_S = 3_600.0
_Z = NormalDist().inv_cdf(0.975)

Series = Sequence[tuple[float, float]]
"""Seconds and values of one process or of one folder."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per hour, with a 95 % interval."""

    per_hour: float
    low: float
    high: float

    def verdict(self, bound_per_hour: float) -> str:
        """Return "holds" or "broken" where the whole interval is on one side of the bound, otherwise "open": the run was too short."""
        if self.high <= bound_per_hour:
            return "holds"
        return "broken" if self.low > bound_per_hour else "open"


def slope_of(series: Iterable[Series], block_s: float = BLOCK_S) -> Slope | None:
    """Fit one slope by least squares, with a level for each series; None for too few blocks."""
    blocks = [block for one in series if len(block := _blocks(one, block_s)) > 1]
    pairs = [pair for one in blocks for pair in _centred(one)]
    freedom = len(pairs) - len(blocks) - 1
    spread = sum(at * at for at, _ in pairs)
    if freedom < 1 or spread == 0:
        return None
    slope = sum(at * value for at, value in pairs) / spread
    error = math.sqrt(sum((value - slope * at) ** 2 for at, value in pairs) / freedom / spread)
    reach = _t_quantile(freedom) * error
    return Slope(*(_HOUR_S * one for one in (slope, slope - reach, slope + reach)))


def growth_row(part: str, quantity: str, series: Sequence[Series], bound_per_hour: float) -> dict[str, Any]:
    """Return one row of the report: the last level, the slope with its interval, the bound, the verdict."""
    slope = slope_of(series)
    last = max((one[-1] for one in series if one), default=(0.0, 0.0))
    row = {"part": part, "quantity": quantity, "last": round(last[1], 1), "bound_per_hour": bound_per_hour}
    if slope is None:
        return {**row, "per_hour": None, "interval": None, "verdict": "open"}
    interval = [round(slope.low, 1), round(slope.high, 1)]
    verdict = slope.verdict(bound_per_hour)
    return {**row, "per_hour": round(slope.per_hour, 1), "interval": interval, "verdict": verdict}


def _blocks(series: Series, block_s: float) -> list[tuple[float, float]]:
    """Return the mean time and value of each block."""
    blocks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for at_s, value in series:
        blocks[int(at_s // block_s)].append((at_s, value))
    return [(fmean(at for at, _ in some), fmean(value for _, value in some)) for _, some in sorted(blocks.items())]


def _centred(series: Series) -> list[tuple[float, float]]:
    at_mean, value_mean = fmean(at for at, _ in series), fmean(value for _, value in series)
    return [(at - at_mean, value - value_mean) for at, value in series]


def _t_quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile, exact for one and two degrees of freedom and within 1 % above (Cornish and Fisher)."""
    if freedom <= 2:
        return (12.706, 4.303)[freedom - 1]
    z, n = _Z, freedom
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return z + sum(terms)
