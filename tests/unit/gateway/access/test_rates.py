"""Rates and daily quotas: the token bucket against a brute-force oracle, and the retry times of rejections."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from services.contracts.access import DAY_S, Allowance
from services.errors import QuotaExceeded
from services.gateway.access.rates import Rates


def accepts(rates: Rates, allowance: Allowance, now_s: float, key_id: str = "k", now_unix_s: float = 0.0) -> bool:
    """Return whether a call at this time is admitted."""
    try:
        rates.spend(key_id, allowance, now_unix_s, now_s)
    except QuotaExceeded:
        return False
    return True


def oracle(times_s: list[float], rate: float, burst: float) -> list[bool]:
    """Accept a call if every interval that ends with it has at most burst + rate x length calls."""
    accepted: list[Fraction] = []
    verdicts = []
    for time_s in map(Fraction, times_s):
        passed = [*accepted, time_s]
        fits = all(
            len(passed) - first <= Fraction(burst) + Fraction(rate) * (time_s - passed[first])
            for first in range(len(passed))
        )
        verdicts.append(fits)
        if fits:
            accepted.append(time_s)
    return verdicts


gaps = st.lists(st.integers(0, 256).map(lambda sixty_fourths: sixty_fourths / 64), max_size=60)


@given(gaps=gaps, rate=st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0, 64.0]), burst=st.integers(1, 12))
def test_the_bucket_admits_what_its_definition_admits(gaps: list[float], rate: float, burst: int) -> None:
    """The bucket equals the oracle for every call, in binary fractions, where floats are exact."""
    times_s = [1_000.0 + sum(gaps[: index + 1]) for index in range(len(gaps))]
    rates, allowance = Rates(), Allowance(rate_per_s=rate, burst=burst)

    verdicts = [accepts(rates, allowance, time_s) for time_s in times_s]

    assert verdicts == oracle(times_s, rate, burst)


@given(rate=st.floats(0.01, 10_000), burst=st.floats(1, 100), start_s=st.floats(0, 1e6))
def test_a_call_after_the_announced_wait_is_admitted(rate: float, burst: float, start_s: float) -> None:
    """A call after `retry_after_s` is admitted, and an earlier call is rejected."""
    rates, allowance = Rates(), Allowance(rate_per_s=rate, burst=burst)
    while accepts(rates, allowance, start_s):
        pass

    with pytest.raises(QuotaExceeded) as refused:
        rates.spend("k", allowance, 0.0, start_s)
    wait_s = refused.value.retry_after_s

    assert not accepts(rates, allowance, start_s + wait_s * 0.9)
    assert accepts(rates, allowance, start_s + wait_s * (1 + 1e-6) + 1e-6)


def test_a_day_ends_at_midnight_and_says_so() -> None:
    """The daily quota resets at midnight UTC, and the rejection has the time until then."""
    rates, allowance = Rates(), Allowance(daily_quota=2)
    noon = 20_000 * 86_400 + 43_200
    for _ in range(2):
        rates.spend("k", allowance, noon, 0.0)

    with pytest.raises(QuotaExceeded) as refused:
        rates.spend("k", allowance, noon, 0.0)

    assert (refused.value.problem, refused.value.retry_after_s) == ("this key's daily quota is used up", 43_200)
    assert accepts(rates, allowance, 0.0, now_unix_s=noon + 43_200)


@given(num_processes=st.integers(1, 50), rate=st.floats(0.1, 1e4), burst=st.floats(1, 1e4))
def test_processes_share_a_rate(num_processes: int, rate: float, burst: float) -> None:
    """Together they admit the rate and the daily quota, rounded up; each has a burst of at least one call."""
    shared = Allowance(rate_per_s=rate, burst=burst, daily_quota=9).shared_by(num_processes)

    assert shared.rate_per_s is not None
    assert shared.rate_per_s * num_processes == pytest.approx(rate)
    assert shared.burst == max(1.0, burst / num_processes)
    assert shared.daily_quota is not None
    assert 9 <= shared.daily_quota * num_processes < 9 + num_processes


class RatesMachine(RuleBasedStateMachine):
    """Two keys with changing limits never exceed the daily quota; without a rate they can use all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.rates, self.now_s = Rates(), 0.0
        self.allowance = Allowance(rate_per_s=4.0, burst=3.0, daily_quota=5)
        self.today: dict[str, int] = {}

    @rule(gap_s=st.one_of(st.floats(0, 2), st.just(float(DAY_S))))
    def wait(self, gap_s: float) -> None:
        """Advance the clock."""
        before = int(self.now_s // DAY_S)
        self.now_s += gap_s
        if int(self.now_s // DAY_S) != before:
            self.today = {}

    @rule(rate=st.sampled_from([None, 0.5, 4.0]), quota=st.sampled_from([None, 0, 5]))
    def change(self, rate: float | None, quota: int | None) -> None:
        self.allowance = Allowance(rate_per_s=rate, burst=3.0, daily_quota=quota)

    @rule(key_id=st.sampled_from(["a", "b"]))
    def call(self, key_id: str) -> None:
        """Make a call; at the quota it is rejected."""
        is_at_quota = self.allowance.daily_quota is not None and self.today.get(key_id, 0) >= self.allowance.daily_quota
        is_in = accepts(self.rates, self.allowance, self.now_s, key_id, self.now_s)
        assert not (is_in and is_at_quota)
        if self.allowance.rate_per_s is None:
            assert is_in is not is_at_quota
        self.today[key_id] = self.today.get(key_id, 0) + is_in


TestRatesMachine = RatesMachine.TestCase
