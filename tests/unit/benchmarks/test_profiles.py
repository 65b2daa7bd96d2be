"""The load profiles: their rates over time, their users, and their determinism."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.profiles import SPIKE_FACTOR, Departure, Profile, departures


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
