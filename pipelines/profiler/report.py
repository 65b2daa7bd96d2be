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
            "operations": [asdict(one) for one in self.operations],
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
    numbers = sorted({one.device for one in trace.events if one.is_on_device})
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
        recorded_us=max(one.end_us for one in trace.events),
        unknown=activity.unknown_us / span_us,
        lacks_kernels=not trace.is_of_gpu and any(is_launch(one.name) for one in trace.of(ActivityKind.RUNTIME)),
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
    rows = [one.as_row() for one in profiles]
    verdict = common_verdict([one.verdict for one in profiles])
    top = rows[0] if len(rows) == 1 else {"bottleneck": verdict.bottleneck.value, "sentence": verdict.sentence}
    return top | {"ranks": rows}


def as_lines(profiles: Sequence[RankProfile]) -> list[str]:
    """Return the printed text: a table of shares, the most expensive operations of each rank, then the sentence."""
    lines = []
    for one in profiles:
        parts, limits = one.parts, limits_of(one.trace)
        where = "GPU" if one.trace.is_of_gpu else "CPU"
        lines.append(f"rank {one.trace.rank}, {where}: {parts.span_us / 1_000:,.1f} ms in {one.trace.path.name}")
        lines += [
            f"  {SHARE_NAMES[name]:24}{share:7.1%}{share * parts.span_us / 1_000:12,.2f} ms"
            for name, share in one.shares.items()
        ]
        lines += [f"  {operation_line(operation)}" for operation in one.operations]
        if limits is not None:
            lines.append(f"  roofline: {limits.source}, {limits.bytes_per_s / 1e9:,.0f} GB/s")
        lines += [f"  note: {note}" for note in one.notes]
        if len(profiles) > 1:
            lines.append(f"  {one.verdict.sentence}")
    lines.append(common_verdict([one.verdict for one in profiles]).sentence)
    return lines


def operation_line(one: OperationCost) -> str:
    """Return a line about an operation: share of the span, calls, bound, roofline fraction."""
    roofline = "roofline unknown" if one.roofline_share is None else f"{one.roofline_share:.0%} of its roofline"
    name = one.name if len(one.name) <= 44 else f"{one.name[:43]}…"
    return f"{name:46}{one.share:6.1%}  {one.calls:,} calls, bound by {one.bound}, {roofline}"


def _work(trace: Trace) -> list[tuple[TraceEvent, float]]:
    if trace.is_of_gpu:
        return [(one, one.duration_us) for one in trace.of(ActivityKind.KERNEL, ActivityKind.COPY)]
    own = [(one, sum(end_us - start_us for start_us, end_us in pieces)) for one, pieces in own_times(trace)]
    return own


def _dtype(trace: Trace, operations: Sequence[OperationCost]) -> str | None:
    """Return the dtype of a device's products, or of a CPU's most expensive operation; None if unknown."""
    if trace.is_of_gpu:
        return dtype_of_products(
            trace, [one for one in trace.of(ActivityKind.KERNEL) if not is_communication(one.name)]
        )
    name = operations[0].name if operations else ""
    return next((dtype_of(one) for one in trace.of(ActivityKind.OPERATION) if one.name == name), None)


def _direction(trace: Trace) -> str:
    """Return the direction of most of the copies' time, `fill` for fills, and "" without copies."""
    times: Counter[str] = Counter()
    for one in trace.of(ActivityKind.COPY):
        found = _DIRECTION.search(one.name)
        times[found[0] if found else "fill" if "memset" in one.name.lower() else ""] += int(1_000 * one.duration_us)
    return times.most_common(1)[0][0] if times else ""
