"""One rank's figures, from its trace to text and JSON: parts, shares, operations, verdict.

The JSON holds `ranks`, a row for each. At the top level it also holds a single rank's fields, or for several ranks the
common bottleneck and its sentence.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.profiler.activity import Activity, activity_of, own_times
from pipelines.profiler.events import ActivityKind, Trace, TraceEvent
from pipelines.profiler.names import is_communication, is_launch
from pipelines.profiler.operations import OperationCost, dtype_of, dtype_of_products, limits_of, most_expensive
from pipelines.profiler.shares import Shares, TimeParts, parts_of, shares_of
from pipelines.profiler.verdict import BottleneckReport, Circumstances, common_verdict, verdict_of

SHARE_NAMES = {
    "compute": "compute (products)",
    "memory": "memory-bound kernels",
    "communication_exposed": "exposed communication",
    "communication_hidden": "hidden communication",
    "copy": "exposed copies",
    "launch": "launch gaps",
    "data_wait": "data wait",
    "host": "host",
}
_NOTED = 0.01
_WITHOUT_BF16 = re.compile(r"\b[VPKM]\d{2,3}\b|\bT4\b|TITAN|GTX|RTX 20\d\d|Quadro")
"""NVIDIA's cards before Ampere."""
_DIRECTION = re.compile(r"[HDP]to[HDP]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """The figures of one rank's trace. `devices` holds the parts by device if it used several."""

    trace: Trace
    activity: Activity
    parts: TimeParts
    shares: Shares
    operations: Sequence[OperationCost]
    verdict: BottleneckReport
    devices: dict[int, TimeParts]

    @property
    def notes(self) -> list[str]:
        """Caveats of the figures."""
        interrupted = self.activity.interrupted_us / self.parts.span_us if self.parts.span_us > 0 else 0.0
        why = f"{interrupted:.0%} of the time is in gaps that do not recur; the bottleneck excludes them"
        return [*self.trace.notes, *([why] if interrupted >= _NOTED else [])]

    def as_row(self) -> dict[str, Any]:
        return {
            "rank": self.trace.rank,
            "trace": self.trace.path.name,
            **asdict(self.parts),
            "shares": dict(self.shares.items()),
            "operations": [asdict(operation) for operation in self.operations],
            "devices": {str(number): asdict(parts) for number, parts in self.devices.items()},
            "bottleneck": self.verdict.bottleneck.value,
            "sentence": self.verdict.sentence,
            "notes": self.notes,
        }


def profile_of(trace: Trace) -> RankProfile:
    """Return the figures of a trace."""
    activity = activity_of(trace)
    parts, shares = parts_of(activity), shares_of(activity)
    work = _work(trace)
    operations = most_expensive(trace, parts.span_us, work)
    numbers = sorted({event.device for event in trace.events if event.is_on_device})
    span_us = parts.span_us or 1.0
    about = Circumstances(
        is_of_gpu=trace.is_of_gpu,
        interrupted=activity.interrupted_us / span_us,
        is_unrecorded=2 * activity.unrecorded_us > shares.data_wait * parts.span_us,
        dtype=_dtype(trace, operations),
        operations=operations,
        num_activities=len(work),
        active_us=parts.span_us - parts.idle_us,
        span_us=parts.span_us,
        recorded_us=max(event.end_us for event in trace.events),
        unknown=activity.unknown_us / span_us,
        lacks_kernels=not trace.is_of_gpu and any(is_launch(event.name) for event in trace.of(ActivityKind.RUNTIME)),
        half="fp16" if any(_WITHOUT_BF16.search(name) for name in trace.device_names.values()) else "bf16",
        copies=_direction(trace),
    )
    devices = {number: parts_of(activity_of(trace, number)) for number in numbers} if len(numbers) > 1 else {}
    return RankProfile(
        trace=trace,
        activity=activity,
        parts=parts,
        shares=shares,
        operations=operations,
        verdict=verdict_of(shares, about),
        devices=devices,
    )


def as_json(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """Return the content of `--json`."""
    rows = [profile.as_row() for profile in profiles]
    verdict = common_verdict([profile.verdict for profile in profiles])
    top = rows[0] if len(rows) == 1 else {"bottleneck": verdict.bottleneck.value, "sentence": verdict.sentence}
    return top | {"ranks": rows}


def as_lines(profiles: Sequence[RankProfile]) -> list[str]:
    """Return the printed text: a table of shares, the most expensive operations of each rank, then the sentence."""
    lines = []
    for profile in profiles:
        parts, limits = profile.parts, limits_of(profile.trace)
        where = "GPU" if profile.trace.is_of_gpu else "CPU"
        lines.append(
            f"rank {profile.trace.rank}, {where}: {parts.span_us / 1_000:,.1f} ms in {profile.trace.path.name}"
        )
        lines += [
            f"  {SHARE_NAMES[name]:24}{share:7.1%}{share * parts.span_us / 1_000:12,.2f} ms"
            for name, share in profile.shares.items()
        ]
        lines += [f"  {operation_line(operation)}" for operation in profile.operations]
        if limits is not None:
            lines.append(f"  roofline: {limits.source}, {limits.bytes_per_s / 1e9:,.0f} GB/s")
        lines += [f"  note: {note}" for note in profile.notes]
        if len(profiles) > 1:
            lines.append(f"  {profile.verdict.sentence}")
    lines.append(common_verdict([profile.verdict for profile in profiles]).sentence)
    return lines


def operation_line(operation: OperationCost) -> str:
    """Return a line about an operation: share of the span, calls, bound, roofline fraction."""
    roofline = (
        "roofline unknown" if operation.roofline_share is None else f"{operation.roofline_share:.0%} of its roofline"
    )
    name = operation.name if len(operation.name) <= 44 else f"{operation.name[:43]}…"
    return f"{name:46}{operation.share:6.1%}  {operation.calls:,} calls, bound by {operation.bound}, {roofline}"


def _work(trace: Trace) -> list[tuple[TraceEvent, float]]:
    if trace.is_of_gpu:
        return [(event, event.duration_us) for event in trace.of(ActivityKind.KERNEL, ActivityKind.COPY)]
    own = [(event, sum(end_us - start_us for start_us, end_us in pieces)) for event, pieces in own_times(trace)]
    return own


def _dtype(trace: Trace, operations: Sequence[OperationCost]) -> str | None:
    """Return the dtype of a device's products, or of a CPU's most expensive operation; None if unknown."""
    if trace.is_of_gpu:
        return dtype_of_products(
            trace, [event for event in trace.of(ActivityKind.KERNEL) if not is_communication(event.name)]
        )
    name = operations[0].name if operations else ""
    return next((dtype_of(event) for event in trace.of(ActivityKind.OPERATION) if event.name == name), None)


def _direction(trace: Trace) -> str:
    """Return the direction of most of the copies' time, `fill` for fills, and "" without copies."""
    times: Counter[str] = Counter()
    for event in trace.of(ActivityKind.COPY):
        match = _DIRECTION.search(event.name)
        times[match[0] if match else "fill" if "memset" in event.name.lower() else ""] += int(1_000 * event.duration_us)
    return times.most_common(1)[0][0] if times else ""
