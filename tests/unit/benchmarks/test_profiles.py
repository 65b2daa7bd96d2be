"""The load profiles: their rates over time, their users, and their determinism."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.profiles import SPIKE_FACTOR, Departure, Profile, departures, long_tail


def rate(planned: list[Departure], from_s: float, to_s: float) -> float:
    """The mean rate in a stretch of time."""
    return sum(from_s <= one.at_s < to_s for one in planned) / (to_s - from_s)


@given(st.sampled_from(Profile), st.sampled_from([1.0, 7.5, 40.0]), st.sampled_from([3.0, 30.0]))
def test_every_shape_keeps_its_mean_rate_and_its_time(profile: Profile, rate_rps: float, duration_s: float) -> None:
    """Without the spike's addition the mean is the rate; departures are in order, inside the duration and deterministic."""
    planned = departures(profile, rate_rps, duration_s)

    assert len([one for one in planned if not one.is_spike]) == round(rate_rps * duration_s)
    assert all(one.at_s <= other.at_s for one, other in pairwise(planned))
    assert all(0 <= one.at_s <= duration_s for one in planned)
    assert planned == departures(profile, rate_rps, duration_s)


def test_the_spike_is_twelve_times_the_rate_in_the_middle_third() -> None:
    """It adds nothing before and after."""
    planned = departures(Profile.SPIKE, 10, 30)
    wave = [one for one in planned if one.is_spike]

    assert rate(wave, 10, 20) == SPIKE_FACTOR * 10
    assert len(wave) == SPIKE_FACTOR * 10 * 10
    assert rate(planned, 0, 10) == rate(planned, 20, 30) == 10


def test_the_rates_of_a_day_and_of_a_steady_load() -> None:
    """A day has a quarter of the rate at both ends and 1.75 times in the middle; a steady load has even departures."""
    planned = departures(Profile.DIURNAL, 100, 100)

    assert rate(planned, 0, 2) == pytest.approx(25, abs=2)
    assert rate(planned, 49, 51) == pytest.approx(175, abs=2)
    assert rate(planned, 24, 26) == pytest.approx(100, abs=3)
    steady = departures(Profile.STEADY, 10, 2)
    assert [one.at_s for one in steady] == pytest.approx([number / 10 for number in range(20)])


def test_the_tail_is_long() -> None:
    """Half of the requests are by users with one request; among the others the first rank has most."""
    ranks = long_tail(num_heads=100, num_requests=10_000)
    known = Counter(rank for rank in ranks if rank < 100)
    newcomers = Counter(rank for rank in ranks if rank >= 100)

    assert 0.48 < sum(newcomers.values()) / 10_000 < 0.52
    assert set(newcomers.values()) == {1}
    assert known[0] > 2 * known[4] > 4 * known[60]
