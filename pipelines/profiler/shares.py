"""Each microsecond of a rank's span, by part and by cause. Pure sums of intervals.

Where parts overlap, compute takes precedence over communication, copy and idle, in this order; they add up to the span.
The shares divide the same time more finely and add up to 1: computing during a collective is `communication_hidden`,
the rest of it is bound by compute or by memory.
"""

from dataclasses import dataclass, fields

from pipelines.profiler.activity import Activity
from pipelines.profiler.intervals import intersect, subtract, total, union


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Microseconds from the first to the last activity. `communication_hidden_us` is part of `compute_us`."""

    span_us: float
    compute_us: float
    communication_exposed_us: float
    copy_exposed_us: float
    idle_us: float
    communication_hidden_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the span, in [0, 1], that add up to 1."""

    compute: float
    """Matrix products, convolutions, attention: bound by FLOP/s."""
    memory: float
    """Other kernels: bound by memory bandwidth."""
    communication_exposed: float
    communication_hidden: float
    """Computing and communicating at the same time."""
    copy: float
    launch: float
    """Short gaps; on a CPU also the fixed cost of each operation."""
    data_wait: float
    host: float

    def items(self) -> list[tuple[str, float]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def parts_of(activity: Activity) -> TimeParts:
    """Return the parts of the span."""
    busy = activity.busy
    running = union(busy, activity.communication)
    span_us = activity.end_us - activity.start_us
    compute_us, running_us = total(busy), total(running)
    all_us = total(union(running, activity.copy))
    return TimeParts(
        span_us=span_us,
        compute_us=compute_us,
        communication_exposed_us=running_us - compute_us,
        copy_exposed_us=all_us - running_us,
        idle_us=span_us - all_us,
        communication_hidden_us=total(intersect(busy, activity.communication)),
    )


def shares_of(activity: Activity) -> Shares:
    """Return the shares of the span. A span of zero length counts as the host's."""
    parts = parts_of(activity)
    if parts.span_us <= 0:
        return Shares(
            compute=0, memory=0, communication_exposed=0, communication_hidden=0, copy=0, launch=0, data_wait=0, host=1
        )
    shown = {
        name: subtract(getattr(activity, name), activity.communication) for name in ("compute", "memory", "dispatch")
    }
    compute_us = total(shown["compute"])
    memory_us = total(subtract(shown["memory"], shown["compute"]))
    dispatch_us = total(union(*shown.values())) - compute_us - memory_us
    of_us = {
        "compute": compute_us,
        "memory": memory_us,
        "communication_exposed": parts.communication_exposed_us,
        "communication_hidden": parts.communication_hidden_us,
        "copy": parts.copy_exposed_us,
        "launch": dispatch_us + total(activity.launch),
        "data_wait": total(activity.data_wait),
        "host": total(activity.host),
    }
    return Shares(**{name: us / parts.span_us for name, us in of_us.items()})
