"""The autoscaling policy: the desired number of replicas by queue length and late answers."""

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from services.gateway.autoscale import LATE_SHARE, replicas_wanted

POLICY = "services.gateway.autoscale:by_queue_and_lateness"


def context(ongoing: float = 0.0, late: dict[str, float] | None = None) -> SimpleNamespace:
    """Return the fields of Ray Serve's autoscaling context that the policy reads."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=10, target_ongoing_requests=8)
    metrics = {} if late is None else {LATE_SHARE: late}
    return SimpleNamespace(
        current_num_replicas=2, total_num_requests=ongoing, aggregated_metrics=metrics, config=config
    )


@pytest.mark.parametrize(
    ("ongoing", "late_share", "wanted"),
    [
        (0, 0.0, 0.0),  # idle: the lower bound
        (32, 0.0, 4.0),  # only the queue
        (4, 0.01, 2.5),  # 1 % late: a quarter more
        (4, 0.5, 4.0),  # half late: at most twice as many
        (80, 0.5, 10.0),  # the larger of the two
        (0, 1e-18, 2.0),  # any late answer: no replica is removed
    ],
)
def test_the_larger_demand_decides(ongoing: float, late_share: float, wanted: float) -> None:
    """For two replicas of eight requests each, the larger of the queue's and the late answers' demand is returned."""
    assert replicas_wanted(2, ongoing, 8.0, late_share) == wanted


def test_ray_serve_loads_the_policy_by_its_name() -> None:
    """The policy survives Ray Serve's serialization; the late fraction is the mean over the replicas."""
    policy = AutoscalingPolicy(policy_function=POLICY)
    shipped = AutoscalingPolicy.from_serialized_policy_def(
        {"policy_function": POLICY}, policy.get_serialized_policy_def()
    ).get_policy()

    assert shipped(context(ongoing=16.0, late={"a": 0.0})) == (2.0, {})
    assert shipped(context(late={"a": 0.02, "b": 0.0})) == (2.5, {})
    assert shipped(context(ongoing=8.0)) == (1.0, {}), "without reports only the queue counts"
