"""Sequential tests and intervals: valid at every look, with one error level over all looks. Pure, with scipy.

Scipy's functions only.

Means. The estimate of a difference and its variance are compared with a mixture of all differences: Robbins' mixture
(Annals of Mathematical Statistics 41, 1970), as the mixture SPRT of Johari, Pekelis and Walsh (arXiv 1512.04922) and as
the one-sided normal mixture with its closed bound of Howard, Ramdas, McAuliffe and Sekhon (Annals of Statistics 49,
2021, section 3.2 and equation 14). Estimates are means over many users, so this is asymptotic (Waudby-Smith, Arbour,
Sinha, Kennedy and Ramdas, arXiv 2103.06476): values must be bounded or clipped, and some hundred users are needed.

Counts of users. A salted hash puts each user into a variant with a known probability, independently of all other users.
So the variants of affected users, in the order of their first event, are independent draws, even if their events depend
on each other. The test is exact for any number of users (Lindon and Malek, arXiv 2011.03567, here one-sided), as is the
test of a sample-ratio mismatch.

`effect`, in the estimate's unit, is the size that the mixture detects soonest; it detects all other sizes too.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from scipy.optimize import brentq
from scipy.special import betainc, betaln, gammaln

_FAR = 30.0
"""Bound on the logarithm of a ratio."""
_CONCENTRATION = 100.0
"""Concentration of the Dirichlet prior around the traffic fractions: it detects a mismatch of a few per cent
soonest."""


def half_width(variance: float, effect: float, alpha: float) -> float:
    """Return the one-sided error bound of an estimate; at any look, at most `alpha` of all runs exceed it."""
    spread = 1 + effect**2 / variance  # information over the mixture's own
    bound = math.log(math.sqrt(spread) / (2 * alpha) + 1)
    return math.sqrt(2 * variance * bound * spread / (spread - 1))


def interval(estimate: float, variance: float, effect: float, alpha: float = 0.05) -> tuple[float, float]:
    """Return the interval that contains the truth at all looks together with probability 1 - `alpha`."""
    half = half_width(variance, effect, alpha / 2)
    return estimate - half, estimate + half


def p_value(estimate: float, variance: float, effect: float) -> float:
    """Return the always-valid two-sided p-value of a difference: 1 over the evidence of the two-sided mixture SPRT."""
    spread = variance + effect**2
    log_evidence = 0.5 * (math.log(variance / spread) + (estimate * effect) ** 2 / (variance * spread))
    return min(1.0, math.exp(-log_evidence))


def log_evidence_of_users(candidate: int, control: int, share: float, ratio: float = 1.0) -> float:
    """Return the log evidence that the candidate's rate of affected users exceeds `ratio` times the control's.

    Args:
        candidate: Affected users of the candidate.
        control: Affected users of the control.
        share: Probability that a user of either variant is the candidate's.
        ratio: Ratio of the rates; 1: the candidate's rate is higher.
    """
    bound = share * ratio / (share * ratio + 1 - share)
    above = float(betainc(control + 1, candidate + 1, 1 - bound))  # the mixture's part above the bound
    if above <= 0:
        return -math.inf
    mixed = float(betaln(candidate + 1, control + 1)) + math.log(above) - math.log(1 - bound)
    return mixed - candidate * math.log(bound) - control * math.log(1 - bound)


@lru_cache(4_096)
def ratio_interval(candidate: int, control: int, share: float, alpha: float) -> tuple[float, float]:
    """Return the interval of the ratio of rates, each side at `alpha`; from 0 to infinity without events."""
    low = _largest_refused(candidate, control, share, alpha)
    high = _largest_refused(control, candidate, 1 - share, alpha)
    return low, 1 / high if high else math.inf


def _largest_refused(candidate: int, control: int, share: float, alpha: float) -> float:
    """Return the largest ratio that the true ratio is shown to exceed, 0 if there is none."""

    def beyond(log_ratio: float) -> float:
        evidence = log_evidence_of_users(candidate, control, share, math.exp(log_ratio)) + math.log(alpha)
        return max(evidence, -_FAR)

    return math.exp(brentq(beyond, -_FAR, _FAR, xtol=1e-9)) if beyond(-_FAR) > 0 else 0.0


def mismatch_p_value(users: Sequence[int], shares: Sequence[float]) -> float:
    """Return the always-valid p-value that users are in the variants by these fractions, which sum to 1.

    A small value means a sample-ratio mismatch.
    """
    prior = [_CONCENTRATION * share for share in shares]
    log_evidence = float(
        gammaln(_CONCENTRATION)
        - gammaln(_CONCENTRATION + sum(users))
        + sum(
            gammaln(prior_count + count) - gammaln(prior_count) - count * math.log(share)
            for prior_count, count, share in zip(prior, users, shares, strict=True)
        )
    )
    return min(1.0, math.exp(min(0.0, -log_evidence)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's method (1979), valid under any dependence."""
    corrected, least = [0.0] * len(p_values), 0.0
    for before, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        corrected[index] = least = min(1.0, max(least, p_values[index] * (len(p_values) - before)))
    return corrected
