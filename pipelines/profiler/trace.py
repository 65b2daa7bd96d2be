"""Reads profiler recordings: Kineto's and Chrome's traces, as .json or gzip, and SQLite files of `nsys export`.

One `Trace` (`events.py`) is a file of torch's profiler, or a process of an nsys report (`nsys.py`). An event without a
finite time, or with a negative duration, is skipped, and a note counts the skipped events by reason. Files are
untrusted: their sizes are limited, and each fault is an InvalidRequest. The reader knows only the kind of an event, not
its meaning.
"""

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from models.errors import InvalidRequest
from pipelines.profiler.events import (
    FIELD,
    OUR_METADATA,
    ActivityKind,
    MeasuredLimits,
    Trace,
    TraceEvent,
    number_of,
    placed,
    skipped_notes,
    text_of,
)
from pipelines.profiler.nsys import read_nsys

_GZIP, _SQLITE = b"\x1f\x8b", b"SQLite format 3\x00"
MAX_BYTES, _MAX_ITEMS, _MAX_NESTED = 512 * 2**20, 60_000_000, 20_000_000
"""Limits of a trace's unpacked JSON: bytes, commas, objects and lists.

Kineto writes a tenth of these counts in as many bytes, and Python needs ten times the bytes.
"""
_MAX_TIME_US = 1e18
"""Times later than this after 1970 are invalid."""
_MAX_DIGITS = 40


_KINDS = {
    "kernel": ActivityKind.KERNEL,
    "concurrent_kernel": ActivityKind.KERNEL,
    "gpu_memcpy": ActivityKind.COPY,
    "gpu_memset": ActivityKind.COPY,
    "memcpy": ActivityKind.COPY,
    "memset": ActivityKind.COPY,
    "cpu_op": ActivityKind.OPERATION,
    "operator": ActivityKind.OPERATION,
    "cuda_runtime": ActivityKind.RUNTIME,
    "cuda_driver": ActivityKind.RUNTIME,
    "hip_runtime": ActivityKind.RUNTIME,
    "xpu_runtime": ActivityKind.RUNTIME,
    "mtia_runtime": ActivityKind.RUNTIME,
    "privateuse1_runtime": ActivityKind.RUNTIME,
    "runtime": ActivityKind.RUNTIME,
    "user_annotation": ActivityKind.RANGE,
    "trace": ActivityKind.RANGE,
    "python_function": ActivityKind.PYTHON,
}
"""By Kineto's category in lower case, including older names.

`trace` is the profiler's own time. `gpu_user_annotation` and `cuda_sync` are not work of a device.
"""
_KINDS_BY_PROCESS = {"CPU functions": ActivityKind.OPERATION, "CUDA functions": ActivityKind.KERNEL}
"""For traces of torch.autograd.profiler without Kineto, which have no categories."""
_RANGE_NAMES = re.compile(r"ProfilerStep|enumerate\(DataLoader\)|Optimizer\.|## ")
"""Prefixes of ranges that older versions record as operations."""


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """Read the ranks of these files, sorted; missing or equal ranks are numbered in order. Raises InvalidRequest."""
    traces = [trace for path in paths for trace in _read(path)]
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        return [
            Trace(trace.path, number, trace.events, trace.device_names, trace.measured, trace.notes)
            for number, trace in enumerate(traces)
        ]
    return sorted(traces, key=lambda trace: trace.rank)


def _read(path: Path) -> list[Trace]:
    if not path.is_file():
        raise InvalidRequest(FIELD, f"{path} does not exist", "give a file that a profiler wrote")
    try:
        with path.open("rb") as file:
            head = file.read(len(_SQLITE))
    except OSError as error:
        raise InvalidRequest(FIELD, f"{path} cannot be read ({error.strerror})", "give a readable file") from error
    if not head:
        raise InvalidRequest(FIELD, f"{path} is empty", "record it again, and export it after the profiler has ended")
    traces = read_nsys(path) if head == _SQLITE else [_read_json(path, is_gzip=head.startswith(_GZIP))]
    for trace in traces:
        if not any(event.is_on_device or event.kind is ActivityKind.OPERATION for event in trace.events):
            raise InvalidRequest(
                FIELD,
                f"{path} holds neither a device's activity nor an operation of torch",
                "record it with ProfilerActivity.CPU or CUDA, and work inside the profiler",
            )
    return traces


def _read_json(path: Path, *, is_gzip: bool) -> Trace:
    content = _json_of(path, is_gzip=is_gzip)
    about = content if isinstance(content, dict) else {}
    raw = about.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(raw, list):
        raise InvalidRequest(
            FIELD, f"{path} is JSON without a list of traceEvents", "give a trace of torch's profiler or Chrome's"
        )
    left_out: Counter[str] = Counter()
    events = placed(_events(raw, left_out))
    distributed = about.get("distributedInfo")
    rank = distributed.get("rank", 0) if isinstance(distributed, dict) else 0
    properties = about.get("deviceProperties")
    names = {
        device["id"]: text_of(device["name"])
        for device in (properties if isinstance(properties, list) else ())
        if isinstance(device, dict) and isinstance(device.get("id"), int) and "name" in device
    }
    return Trace(
        path,
        rank if isinstance(rank, int) else 0,
        events,
        names,
        _measured(about.get(OUR_METADATA)),
        skipped_notes(left_out),
    )


def _json_of(path: Path, *, is_gzip: bool) -> Any:
    again = "copy it again, or record it again and wait until the export ends"
    try:
        with gzip.open(path) if is_gzip else path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (EOFError, zlib.error, OSError) as error:
        raise InvalidRequest(FIELD, f"{path} ends in the middle, or is damaged ({error})", again) from error
    num_nested = content.count(b"{") + content.count(b"[")
    if len(content) > MAX_BYTES or num_nested > _MAX_NESTED or content.count(b",") > _MAX_ITEMS:
        limits = f"{MAX_BYTES // 2**20} MiB or {_MAX_NESTED:,} objects"
        raise InvalidRequest(FIELD, f"{path} holds more than {limits}", "record fewer steps (schedule(active=3))")
    text = content.decode(errors="replace")
    try:
        return json.loads(text, strict=False, parse_int=_int_of if _has_long_numbers(content) else None)
    except json.JSONDecodeError as error:
        whole = text.rstrip()
        is_cut = error.pos > 0 and (error.pos >= len(whole) - 1 or not whole.endswith(("}", "]")))
        what = "ends in the middle" if is_cut else f"is not JSON at line {error.lineno}, column {error.colno}"
        raise InvalidRequest(
            FIELD, f"{path} {what}", again if is_cut else "give a trace that a profiler exported"
        ) from error
    except RecursionError as error:
        raise InvalidRequest(FIELD, f"{path} is nested too deeply", "give a trace that a profiler exported") from error


_LONG_NUMBER = re.compile(rb"\d{%d}" % _MAX_DIGITS)


def _has_long_numbers(content: bytes) -> bool:
    return _LONG_NUMBER.search(content) is not None


def _int_of(digits: str) -> float:
    """Return a number of any length; Python refuses to make integers of thousands of digits."""
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def _events(raw: Iterable[Any], left_out: Counter[str]) -> Iterator[TraceEvent]:
    """Yield the events with a place in time. Pairs of begin and end are matched within their thread."""
    open_events: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in raw:
        if not isinstance(record, dict):
            left_out["no object"] += 1
            continue
        phase = record.get("ph")
        if phase == "B":
            open_events.setdefault(_lane(record), []).append(record)
        elif phase == "E":
            begun = open_events.get(_lane(record))
            if begun:
                first = begun.pop()
                yield from _event(first, number_of(record.get("ts")) - number_of(first.get("ts")), left_out)
        elif phase == "X":
            yield from _event(record, number_of(record.get("dur")), left_out)


def _event(record: Mapping[str, Any], duration_us: float, left_out: Counter[str]) -> Iterator[TraceEvent]:
    kind = _kind_of(record)
    if kind is None:
        return
    start_us = number_of(record.get("ts"))
    if not abs(start_us) < _MAX_TIME_US or not abs(duration_us) < _MAX_TIME_US:
        left_out["a time is missing or not a number"] += 1
    elif duration_us < 0:
        left_out["a duration is negative"] += 1
    else:
        args = record.get("args")
        thread = (_hashable(record.get("pid")), _hashable(record.get("tid")))
        yield TraceEvent(
            kind,
            text_of(record.get("name", "")),
            start_us,
            start_us + duration_us,
            thread,
            args if isinstance(args, dict) else {},
        )


def _measured(noted: Any) -> MeasuredLimits | None:
    """Return our recorder's measurements, None if there are none."""
    if not isinstance(noted, dict) or not isinstance(noted.get("operations"), dict):
        return None
    flops_per_s, bytes_per_s = (number_of(noted.get(name)) for name in ("flops_per_s", "bytes_per_s"))
    if not (0 < flops_per_s < math.inf and 0 < bytes_per_s < math.inf):
        return None
    operations = {
        text_of(name): (number_of(cost[0]), number_of(cost[1]))
        for name, cost in noted["operations"].items()
        if isinstance(cost, list) and len(cost) == 2
    }
    known = {name: cost for name, cost in operations.items() if cost[0] >= 0 and 0 < cost[1] < math.inf}
    return MeasuredLimits(str(noted.get("dtype")), flops_per_s, bytes_per_s, known)


def _kind_of(record: Mapping[str, Any]) -> ActivityKind | None:
    name = text_of(record.get("name", ""))
    kind = _KINDS.get(str(record["cat"]).lower()) if "cat" in record else _KINDS_BY_PROCESS.get(str(record.get("pid")))
    if kind is ActivityKind.OPERATION and _RANGE_NAMES.match(name):
        return ActivityKind.RANGE
    return ActivityKind.OPERATION if kind is ActivityKind.RANGE and name.startswith(f"{OUR_METADATA}::") else kind


def _lane(record: Mapping[str, Any]) -> tuple[str, str]:
    return str(record.get("pid")), str(record.get("tid"))


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | str) else str(value)
