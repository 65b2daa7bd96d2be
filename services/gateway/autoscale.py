"""Scaling policy of the gateway replicas: follow the queue, and add more while answers miss their deadline.

    for the queue     ongoing requests / target requests per replica
    for the deadline  25 % more per percent of late answers, at most double

The larger result applies. Ray Serve's config names this as `policy_function` and enforces its own bounds and delays.
Its controller receives only the source of this module, so the module imports nothing from this repository.
"""

from typing import Any

LATE_SHARE = "late_share"
"""Name under which each replica reports its fraction (0 to 1) of late answers since the last report."""

_MORE_PER_LATE_SHARE = 25.0
_MOST = 2.0


def replicas_wanted(running: int, ongoing: float, target_ongoing: float, late_share: float) -> float:
    """Return the wanted number of replicas, before rounding, bounds and delays.

    Args:
        running: Running replicas, at least 1.
        ongoing: Running plus queued requests over all replicas.
        target_ongoing: Target requests per replica.
        late_share: Fraction (0 to 1) of late answers over all replicas.
    """
    for_queue = ongoing / target_ongoing
    for_deadline = running * min(_MOST, 1.0 + _MORE_PER_LATE_SHARE * late_share) if late_share > 0 else 0.0
    return max(for_queue, for_deadline)


def by_queue_and_lateness(context: Any) -> tuple[float, dict[str, Any]]:
    """Autoscaling policy for Ray Serve; `context` is its AutoscalingContext."""
    shares = (context.aggregated_metrics or {}).get(LATE_SHARE, {}).values()
    late_share = sum(shares) / len(shares) if shares else 0.0
    running = max(1, context.current_num_replicas)
    wanted = replicas_wanted(
        running, context.total_num_requests, context.config.get_target_ongoing_requests(), late_share
    )
    return wanted, {}
