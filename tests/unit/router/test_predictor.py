"""The latency predictor: an upper bound by load that follows changes and allows trials after a slow period."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.predictor import LatencyPredictor


def trained(seconds: list[float], load: float = 0) -> LatencyPredictor:
    """Return a predictor that observed these latencies, one per second."""
    predictor = LatencyPredictor(first_s=0.0)
    for now_s, took_s in enumerate(seconds):
        predictor.finished(load, took_s, float(now_s))
    return predictor


def test_the_line_is_the_weighted_least_squares_line() -> None:
    """The slope from running moments equals numpy's weighted fit, up to the shrinkage."""
    rng = random.Random(3)
    weight, num = 0.1, 60
    loads = [rng.randint(0, 20) for _ in range(num)]
    seconds = [0.02 + 0.003 * load + rng.gauss(0, 0.001) for load in loads]
    predictor = LatencyPredictor(first_s=0.0, weight=weight)
    for now_s, (load, took_s) in enumerate(zip(loads, seconds, strict=True)):
        predictor.finished(load, took_s, float(now_s))
    weights = np.array([(1 - weight) ** (num - 1)] + [weight * (1 - weight) ** (num - 1 - i) for i in range(1, num)])
    mean, variance = np.average(loads, weights=weights), np.cov(loads, aweights=weights, ddof=0)

    slope, start = np.polyfit(loads, seconds, 1, w=np.sqrt(weights))

    shrunk = slope * variance / (variance + (0.1 * mean) ** 2)
    assert predictor.predict_s(20) - predictor.predict_s(0) == pytest.approx(20 * shrunk, rel=1e-6)
    assert shrunk > 0.9 * slope
    assert predictor.predict_s(mean) > start + mean * slope


@pytest.mark.parametrize("is_mixed", [True, False])
def test_nearly_all_requests_are_covered_and_light_ones_are_not_predicted_as_heavy(is_mixed: bool) -> None:
    """At least 97 % of noisy latencies are within the prediction, which exceeds them by less than 80 % on average."""
    rng, predictor = random.Random(1), LatencyPredictor(first_s=0.0)
    covered, excess = [], []
    for now_s in range(5_000):
        load, work = (rng.randint(0, 8), 30 + rng.expovariate(0.01)) if is_mixed else (0, 0.0)
        took_s = (0.005 + 0.004 * load + 0.0004 * work) * rng.gauss(1, 0.1)
        predicted_s = predictor.predict_s(load, work)
        if now_s >= 200:
            covered.append(took_s <= predicted_s)
            excess.append(predicted_s / took_s)
        predictor.finished(load, took_s, float(now_s), work)

    assert np.mean(covered) >= 0.97
    assert np.mean(excess) < 1.8


@pytest.mark.parametrize(("served", "other"), [((0, 50), (0, 400)), ((0, 50), (8, 50)), ((3, 50), (12, 400))])
def test_a_slope_is_forgotten_while_all_served_requests_are_alike(
    served: tuple[int, int], other: tuple[int, int]
) -> None:
    """After a slow period, 100 requests of one load and work suffice to predict that other requests fit again."""
    rng, predictor, per_work_s, per_load_s = random.Random(0), LatencyPredictor(first_s=0.05), 0.001, 0.03
    for now_s in range(200):
        load, work = rng.randint(0, 8), rng.choice([50, 100, 200, 400])
        predictor.finished(load, 0.01 + per_load_s * load + per_work_s * work, float(now_s), work)
    slow_s = predictor.predict_s(*other)
    true_s = 0.01 + (per_load_s * served[0] + per_work_s * served[1]) / 10
    for now_s in range(200, 300):
        predictor.finished(served[0], true_s * rng.gauss(1, 0.05), float(now_s), served[1])

    assert slow_s > 0.2
    assert predictor.predict_s(*other) < 0.1


@pytest.mark.parametrize(
    ("ended", "num", "took_s", "at_least_s"), [("finished", 4, 0.4, 0.2), ("gave_up", 10, 0.19, 0.19)]
)
def test_slowness_raises_the_prediction_within_a_few_requests(
    ended: str, num: int, took_s: float, at_least_s: float
) -> None:
    """Four slow answers raise the prediction; timeouts raise it above the time waited."""
    predictor = trained([0.05] * 100)
    for now_s in range(100, 100 + num):
        getattr(predictor, ended)(0, took_s, float(now_s))

    assert predictor.predict_s(0) > at_least_s


def test_an_early_timeout_changes_nothing() -> None:
    """A timeout shorter than the prediction does not raise the prediction."""
    predictor = trained([0.1] * 20)
    before_s = predictor.predict_s(0)

    predictor.gave_up(0, 0.01, 20.0)

    assert predictor.predict_s(0) == before_s


@given(st.floats(0.3, 100), st.floats(0.005, 0.09), st.integers(0, 8), st.integers(1, 20))
def test_after_a_slow_period_one_trial_is_allowed_and_its_success_restores_the_tier(
    slow_s: float, fast_s: float, load: int, num_slow: int
) -> None:
    """However slow the replica was, a trial fits 0.19 s within a second, and one fast trial lowers every prediction."""
    predictor = trained([slow_s] * num_slow, load)
    last_s = num_slow - 1.0
    assert predictor.trial_s(load, last_s + 0.1) > 0.19
    assert predictor.trial_s(load, last_s + 1.0) <= 0.19

    predictor.finished(load, fast_s, last_s + 1.0 + fast_s, decay=predictor.decay(last_s + 1.0))

    assert fast_s <= predictor.predict_s(load) <= 0.19


def test_a_trial_lowers_the_prediction_no_further_than_the_decay_that_allowed_it() -> None:
    """Half a second after the last observation, a trial halves the prediction, however fast its result came."""
    predictor = trained([1.0] * 50)
    before_s = predictor.predict_s(0)

    predictor.finished(0, 0.05, 49.55, decay=predictor.decay(49.5))

    assert predictor.predict_s(0) == pytest.approx(before_s / 2)


def test_sparse_requests_keep_their_margin() -> None:
    """Requests that take 10 ms, 20 % more or less, once a minute: the prediction covers nearly all of them."""
    rng, predictor, covered = random.Random(5), LatencyPredictor(first_s=0.0), 0
    for number in range(1_000):
        took_s = 0.01 * rng.uniform(0.8, 1.2)
        covered += took_s <= predictor.predict_s(0)
        predictor.finished(0, took_s, 60.0 * number)

    assert covered >= 970


def test_failed_trials_become_rarer_but_never_stop() -> None:
    """The interval between failed trials doubles, up to four seconds."""
    predictor = trained([0.05])
    now_s, trials = 1.0, []
    while now_s < 1_000:
        if predictor.trial_s(0, now_s) <= 0.19:
            trials.append(now_s)
            predictor.gave_up(0, 0.19, now_s)
        now_s += 0.1

    pauses_s = [later - earlier for earlier, later in pairwise(trials)]
    assert max(pauses_s) <= 4.1
    assert min(pauses_s[-100:]) > 1


LOADS, WORKS = st.integers(0, 50), st.integers(0, 500)


@given(st.lists(st.tuples(LOADS, WORKS, st.floats(0, 10), st.booleans()), max_size=40), LOADS, WORKS)
def test_predictions_are_finite_and_never_negative(
    seen: list[tuple[int, int, float, bool]], load: int, work: int
) -> None:
    """Predictions are finite and monotonic in load and work, and a trial's prediction never exceeds a request's."""
    predictor = LatencyPredictor(first_s=0.1)
    assert (predictor.predict_s(load), predictor.trial_s(load, 1e9)) == (0.1, 0.1)
    for now_s, (seen_load, seen_work, seconds, is_late) in enumerate(seen):
        (predictor.gave_up if is_late else predictor.finished)(seen_load, seconds, float(now_s), seen_work)

    predicted_s = predictor.predict_s(load, work)

    for more in ((10, 0), (0, 100)):
        assert 0 <= predicted_s <= predictor.predict_s(load + more[0], work + more[1]) < float("inf")
    assert 0 <= predictor.trial_s(load, len(seen) + 1.0, work) <= predicted_s
