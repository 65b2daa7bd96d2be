"""Anytime-valid tests against the paper authors' library, exact arithmetic and simulation."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.experiments import sequential

CONFSEQ = [
    (1e-4, 0.2515722481772629, 0.03327971567838972, 0.03781352938145233),
    (4e-5, 0.2515722481772629, 0.02189108498781422, 0.024658432463965593),
    (1e-6, 0.2515722481772629, 0.0039573943010218215, 0.004345093149598966),
    (1e-4, 0.05031444963545259, 0.02862099804279694, 0.03396077197723457),
    (4e-5, 0.05031444963545259, 0.01887878323385905, 0.022070234465999757),
    (1e-6, 0.05031444963545259, 0.0035280992684842967, 0.00395819248018725),
]
"""Variance, effect, and the bounds at 5 and 1 % from confseq 0.0.11, by the authors."""


@pytest.mark.parametrize(("variance", "effect", "at_5", "at_1"), CONFSEQ)
def test_the_bound_is_the_authors(variance: float, effect: float, at_5: float, at_1: float) -> None:
    """The closed-form bound is at least the exact bound and at most 3 % larger."""
    for alpha, exact in ((0.05, at_5), (0.01, at_1)):
        assert exact <= sequential.half_width(variance, effect, alpha) <= 1.03 * exact


@pytest.mark.parametrize(
    ("estimate", "effect", "mixture"),
    [
        (0.02, 0.28171181376963167, -1.3414460905794237),
        (0.04, 0.28171181376963167, 4.65100308729249),
        (0.02, 0.05634236275392634, 0.19455194847730883),
        (0.04, 0.05634236275392634, 6.01131573159941),
    ],
)
def test_p_values_are_those_of_the_two_sided_mixture(estimate: float, effect: float, mixture: float) -> None:
    """The p-value is the inverse of confseq's two-sided mixture, at most 1."""
    p_value = sequential.p_value(estimate, 1e-4, effect)

    assert p_value == pytest.approx(min(1.0, math.exp(-mixture)), rel=1e-9)


@given(st.integers(0, 12), st.integers(0, 12), st.sampled_from([Fraction(1, 2), Fraction(1, 20), Fraction(9, 10)]))
def test_evidence_of_users_is_the_exact_integral(candidate: int, control: int, share: Fraction) -> None:
    """The mixture over all larger rates equals the polynomial's integral, computed in fractions."""
    terms = range(control + 1)
    powers = [(candidate + term + 1, (-1) ** term * math.comb(control, term)) for term in terms]
    integral = sum(factor * (1 - share**power) / power for power, factor in powers)
    exact = integral / (1 - share) / (share**candidate * (1 - share) ** control)

    log_evidence = sequential.log_evidence_of_users(candidate, control, float(share))

    assert math.exp(log_evidence) == pytest.approx(float(exact), rel=1e-6)


@given(st.sampled_from([0.5, 0.2, 0.05]), st.sampled_from([1.0, 1.5]))
def test_evidence_of_users_is_a_fair_bet(share: float, ratio: float) -> None:
    """At the bound, the expected evidence after another user equals the current evidence."""
    bound = share * ratio / (share * ratio + 1 - share)
    for candidate, control in ((0, 0), (3, 5), (20, 11)):
        now = math.exp(sequential.log_evidence_of_users(candidate, control, share, ratio))
        candidate_evidence, control_evidence = (
            math.exp(sequential.log_evidence_of_users(candidate + added, control + 1 - added, share, ratio))
            for added in (1, 0)
        )
        assert bound * candidate_evidence + (1 - bound) * control_evidence == pytest.approx(now, rel=1e-9)


@pytest.mark.parametrize(("candidate", "control", "share"), [(30, 20, 0.5), (4, 90, 0.05), (9, 0, 0.5), (0, 40, 0.2)])
def test_the_interval_of_a_ratio_is_what_is_not_refused(candidate: int, control: int, share: float) -> None:
    """Ratios inside the interval are not rejected; at its ends the evidence is 1 / alpha."""
    low, high = sequential.ratio_interval(candidate, control, share, 0.01)

    assert low < high
    limit = math.log(100)
    if low:
        assert sequential.log_evidence_of_users(candidate, control, share, low) == pytest.approx(limit, abs=1e-6)
    if high < math.inf:
        assert sequential.log_evidence_of_users(control, candidate, 1 - share, 1 / high) == pytest.approx(
            limit, abs=1e-6
        )


def test_few_runs_of_equal_users_ever_reach_the_bound() -> None:
    """With 100 looks at 500 users, the evidence reaches 20 in about 5 % of the runs at most."""
    draw = np.random.default_rng(0)
    ever = 0
    for _ in range(400):
        candidates = (draw.random(500) < 0.3).cumsum().tolist()
        looks = [(candidate, number - candidate) for number, candidate in enumerate(candidates, 1) if number % 5 == 0]
        ever += any(sequential.log_evidence_of_users(*look, 0.3) >= math.log(20) for look in looks)

    assert ever <= 0.065 * 400


def test_a_mismatch_is_found_and_equal_shares_are_not() -> None:
    """52 to 48 of 20,000 users is a mismatch; chance variation and intended unequal fractions are not."""
    assert sequential.mismatch_p_value((10_400, 9_600), (0.5, 0.5)) < 0.001
    assert sequential.mismatch_p_value((10_050, 9_950), (0.5, 0.5)) > 0.5
    assert sequential.mismatch_p_value((18_020, 1_980), (0.9, 0.1)) > 0.5


def test_holm_by_hand() -> None:
    """The smallest p-value is multiplied by the number of tests, the next by one less, and results are monotone."""
    assert sequential.holm([0.01, 0.5, 0.02, 0.03]) == [0.04, 0.5, 0.06, 0.06]
    assert sequential.holm([]) == []
