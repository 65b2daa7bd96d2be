"""How many gateway replicas are wanted. `pytest tests/unit/gateway/test_autoscale.py`."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from services.gateway.autoscale import LATE_SHARE, by_queue_and_lateness, replicas_wanted

POLICY = "services.gateway.autoscale:by_queue_and_lateness"


def context(running: int = 2, ongoing: float = 0.0, late: dict[str, float] | None = None) -> SimpleNamespace:
    """What Ray Serve hands to a policy, as far as ours reads it."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=10, target_ongoing_requests=8)
    metrics = {} if late is None else {LATE_SHARE: late}
    return SimpleNamespace(
        current_num_replicas=running, total_num_requests=ongoing, aggregated_metrics=metrics, config=config
    )


@pytest.mark.parametrize(
    ("ongoing", "late_share", "wanted"),
    [
        (0, 0.0, 0.0),  # nobody asks: down to the lower bound
        (32, 0.0, 4.0),  # by the queue alone
        (4, 0.01, 2.5),  # one per cent late: a quarter more
        (4, 0.5, 4.0),  # half late: twice as many and no more
        (80, 0.5, 10.0),  # the larger of the two
    ],
)
def test_the_larger_demand_is_wanted(ongoing: float, late_share: float, wanted: float) -> None:
    """Two replicas of eight requests each: what the queue and what the deadline would have."""
    assert replicas_wanted(2, ongoing, 8.0, late_share) == wanted


@given(st.integers(1, 50), st.floats(0, 1e4), st.floats(0, 1), st.floats(0, 1))
def test_more_late_answers_never_want_fewer_replicas(running: int, ongoing: float, a: float, b: float) -> None:
    """The wish rises with the late share, is finite, and a late answer alone never doubles it twice."""
    low, high = sorted((a, b))
    fewer, more = (replicas_wanted(running, ongoing, 8.0, share) for share in (low, high))

    assert math.isfinite(more)
    assert fewer <= more <= max(2 * running, ongoing / 8.0)


def test_replicas_are_not_taken_away_while_answers_are_late() -> None:
    """However short the queue is: any late answer holds what there is."""
    assert replicas_wanted(4, 0.0, 8.0, 1e-6) >= 4


def test_the_late_share_is_the_replicas_mean() -> None:
    """Each replica reports its own share; none reports nothing."""
    wanted, _ = by_queue_and_lateness(context(running=2, late={"a": 0.02, "b": 0.0}))

    assert wanted == 2.5
    assert by_queue_and_lateness(context(running=2, ongoing=8.0))[0] == 1.0


def test_ray_serve_takes_the_policy_by_its_name() -> None:
    """It is imported, pickled with its source, and called where our code is not, as the controller does."""
    policy = AutoscalingPolicy(policy_function=POLICY)
    shipped = AutoscalingPolicy.from_serialized_policy_def(
        {"policy_function": POLICY}, policy.get_serialized_policy_def()
    )

    assert shipped.get_policy()(context(ongoing=16.0, late={"a": 0.0})) == (2.0, {})
