"""The number of gateway replicas: by the queue, and more while answers miss their deadline.

    for the queue     ongoing requests / requests that one replica should hold
    for the deadline  one quarter more for each per cent of late answers, at most twice as many

The larger of the two applies. Named as `policy_function` in Ray Serve's config, which keeps it within its bounds and
delays. Its controller gets this module's source, so it imports nothing of ours.
"""

from typing import Any

LATE_SHARE = "late_share"
"""The name under which each replica reports the share (0 to 1) of its answers that were late since it last reported."""

_MORE_PER_LATE_SHARE = 25.0
_MOST = 2.0


def replicas_wanted(running: int, ongoing: float, target_ongoing: float, late_share: float) -> float:
    """Return the wanted number of replicas, before rounding, bounds and delays.

    Args:
        running: Running replicas, at least 1.
        ongoing: Requests in work or waiting, over all replicas.
        target_ongoing: Requests that one replica should hold.
        late_share: The share (0 to 1) of late answers, over all replicas.
    """
    for_queue = ongoing / target_ongoing
    for_deadline = running * min(_MOST, 1.0 + _MORE_PER_LATE_SHARE * late_share) if late_share > 0 else 0.0
    return max(for_queue, for_deadline)


def by_queue_and_lateness(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray Serve's autoscaling policy for the gateway; `context` is its AutoscalingContext."""
    shares = (context.aggregated_metrics or {}).get(LATE_SHARE, {}).values()
    late_share = sum(shares) / len(shares) if shares else 0.0
    running = max(1, context.current_num_replicas)
    wanted = replicas_wanted(
        running, context.total_num_requests, context.config.get_target_ongoing_requests(), late_share
    )
    return wanted, {}
