"""Tests and intervals that may be looked at after every event, with their error held over all looks together. Pure; scipy's functions only.

Means. The estimate of a difference and its variance are compared with a mixture of all differences: Robbins' mixture (Annals of Mathematical Statistics
41, 1970), as the mixture SPRT of Johari, Pekelis and Walsh (arXiv 1512.04922) and as the one-sided normal mixture with its closed bound of Howard, Ramdas,
McAuliffe and Sekhon (Annals of Statistics 49, 2021, section 3.2 and equation 14). Estimates are means over many users, so this is asymptotic
(Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, arXiv 2103.06476): values must be bounded or cut off, and there must be some hundred users.

Counts of users. By a salted hash a user is in a variant with a known probability, independently of all others: so are the variants of the users to whom
something happened, in the order in which it first did, however their events depend on each other. This test is exact for any number of users
(Lindon and Malek, arXiv 2011.03567, here one-sided), and so is that of a sample-ratio mismatch.

`effect` is the size that the mixture is made for, in the estimate's unit: found soonest, while all others are found too.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from scipy.optimize import brentq
from scipy.special import betainc, betaln, gammaln, ndtr

_FAR = 30.0
"""No ratio's logarithm is farther from 0."""
_CONCENTRATION = 100.0
"""Of the Dirichlet prior around the shares: it finds a mismatch of a few per cent soonest."""


def log_evidence_above(estimate: float, variance: float, effect: float) -> float:
    """Return the logarithm of the evidence that what is estimated is above 0: where it is not, it ever exceeds log(1/alpha) in at most alpha of all runs."""
    spread = variance + effect**2
    shift = estimate * effect / math.sqrt(variance * spread)
    upper = float(ndtr(shift))
    return math.log(2) + 0.5 * (math.log(variance / spread) + shift**2) + (math.log(upper) if upper else -math.inf)


def half_width(variance: float, effect: float, alpha: float) -> float:
    """Return how far the truth may lie on one side of an estimate; it ever lies farther in at most `alpha` of all runs."""
    spread = 1 + effect**2 / variance  # information over the mixture's own
    bound = math.log(math.sqrt(spread) / (2 * alpha) + 1)
    return math.sqrt(2 * variance * bound * spread / (spread - 1))


def interval(estimate: float, variance: float, effect: float, alpha: float = 0.05) -> tuple[float, float]:
    """Return the interval that contains the truth at all looks together with probability 1 - `alpha`."""
    half = half_width(variance, effect, alpha / 2)
    return estimate - half, estimate + half


def p_value(estimate: float, variance: float, effect: float) -> float:
    """Return the always valid p-value of a difference, on either side: one over the evidence of the two-sided mixture SPRT."""
    spread = variance + effect**2
    log_evidence = 0.5 * (math.log(variance / spread) + (estimate * effect) ** 2 / (variance * spread))
    return min(1.0, math.exp(-log_evidence))


def log_evidence_of_users(candidate: int, control: int, share: float, ratio: float = 1.0) -> float:
    """Return the logarithm of the evidence that something happens to more than `ratio` times as many of the candidate's users as of the control's.

    Args:
        candidate: Users of the candidate to whom it happened at least once.
        control: The same of the control.
        share: Probability that a user is the candidate's, of those who are in either.
        ratio: Of the rates; 1: more often than the control's.
    """
    bound = share * ratio / (share * ratio + 1 - share)
    above = float(betainc(control + 1, candidate + 1, 1 - bound))  # the mixture's part above the bound
    if above <= 0:
        return -math.inf
    mixed = float(betaln(candidate + 1, control + 1)) + math.log(above) - math.log(1 - bound)
    return mixed - candidate * math.log(bound) - control * math.log(1 - bound)


@lru_cache(4_096)
def ratio_interval(candidate: int, control: int, share: float, alpha: float) -> tuple[float, float]:
    """Return the interval of the ratio of rates, each side at `alpha`; from 0 to infinity where nothing happened yet."""
    low = _largest_refused(candidate, control, share, alpha)
    high = _largest_refused(control, candidate, 1 - share, alpha)
    return low, 1 / high if high else math.inf


def _largest_refused(candidate: int, control: int, share: float, alpha: float) -> float:
    """Return the largest ratio above which the true one is shown to lie, 0 where there is none."""

    def beyond(log_ratio: float) -> float:
        found = log_evidence_of_users(candidate, control, share, math.exp(log_ratio)) + math.log(alpha)
        return max(found, -_FAR)

    return math.exp(brentq(beyond, -_FAR, _FAR, xtol=1e-9)) if beyond(-_FAR) > 0 else 0.0


def mismatch_p_value(users: Sequence[int], shares: Sequence[float]) -> float:
    """Return the always valid p-value that users are in the variants by these shares, which sum to 1 (a sample-ratio mismatch where it is small)."""
    prior = [_CONCENTRATION * share for share in shares]
    log_evidence = float(
        gammaln(_CONCENTRATION)
        - gammaln(_CONCENTRATION + sum(users))
        + sum(
            gammaln(one + count) - gammaln(one) - count * math.log(share)
            for one, count, share in zip(prior, users, shares, strict=True)
        )
    )
    return min(1.0, math.exp(min(0.0, -log_evidence)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's method (1979), which holds however they depend on each other."""
    corrected, least = [0.0] * len(p_values), 0.0
    for before, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        corrected[place] = least = min(1.0, max(least, p_values[place] * (len(p_values) - before)))
    return corrected
