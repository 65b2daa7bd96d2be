"""The events of a profiler recording. One `Trace` is one rank. Times are microseconds from the file's first event."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_MAX_NAME = 4_096
"""Longer names are cut."""
FIELD = "--trace"

OUR_METADATA = "tailrace"
"""The key under which `record` notes its measurements in a trace, and the prefix of ranges around compiled code."""


class ActivityKind(StrEnum):
    """The kind of an event. KERNEL and COPY (copies and fills) run on a device, the others on the host."""

    KERNEL = "kernel"
    COPY = "copy"
    OPERATION = "operation"
    RUNTIME = "runtime"
    RANGE = "range"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event; `thread` is its host thread or the device's stream."""

    kind: ActivityKind
    name: str
    start_us: float
    end_us: float
    thread: tuple[Any, Any]
    args: Mapping[str, Any]

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def device(self) -> int:
        """The device number of a kernel or copy, 0 if the trace has none."""
        value = self.args.get("device", self.thread[0])
        return value if isinstance(value, int) else 0

    @property
    def correlation(self) -> int | None:
        """The number that a launch and its kernel share."""
        value = self.args.get("correlation")
        return value if isinstance(value, int) else None

    @property
    def is_on_device(self) -> bool:
        return self.kind in {ActivityKind.KERNEL, ActivityKind.COPY}


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    """Measurements of `record`: device limits in a dtype (fp32 or bf16), and total cost of shapeless operations."""

    dtype: str
    flops_per_s: float
    bytes_per_s: float
    operations: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's events by start, longest first; device names by number, as the driver reports them."""

    path: Path
    rank: int
    events: Sequence[TraceEvent]
    device_names: Mapping[int, str] = field(default_factory=dict)
    measured: MeasuredLimits | None = None
    notes: Sequence[str] = ()

    @property
    def is_of_gpu(self) -> bool:
        return any(event.is_on_device for event in self.events)

    def of(self, *kinds: ActivityKind) -> list[TraceEvent]:
        return [event for event in self.events if event.kind in kinds]


def skipped_notes(skipped: Mapping[str, int]) -> list[str]:
    return [f"{number} events were skipped: {why}" for why, number in skipped.items() if number]


def text_of(value: Any) -> str:
    """Return a printable and encodable name of limited length."""
    text = str(value)[:_MAX_NAME]
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def number_of(value: Any) -> float:
    """Return a number, NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def placed(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the events by start, enclosing events first, with times relative to the first."""
    ordered = sorted(events, key=lambda event: (event.start_us, -event.end_us))
    origin_us = ordered[0].start_us if ordered else 0.0
    return [
        TraceEvent(
            event.kind, event.name, event.start_us - origin_us, event.end_us - origin_us, event.thread, event.args
        )
        for event in ordered
    ]
