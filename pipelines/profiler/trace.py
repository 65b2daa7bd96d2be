"""Reads what a profiler recorded: Kineto's and Chrome's traces, as .json or gzip, and the SQLite files that `nsys export` writes.

One `Trace` is one rank: a file of torch's profiler, or a process of an nsys report. Times are microseconds from the file's first event.
An event that cannot be placed (no name, no finite time, a negative duration) is left out, and a note counts those of its kind. It knows
no meaning of an event beyond its kind.
"""

import gzip
import json
import math
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from models.errors import InvalidRequest

_GZIP, _SQLITE = b"\x1f\x8b", b"SQLite format 3\x00"
_FIELD = "--trace"
OUR_METADATA = "tailrace"
"""The key of a trace under which `record` notes what it measured, and the beginning of the ranges around our compiled code."""


class Kind(StrEnum):
    """What an event is. KERNEL and COPY (copies and fills) run on a device, the others on the host."""

    KERNEL = "kernel"
    COPY = "copy"
    OPERATION = "operation"
    RUNTIME = "runtime"
    RANGE = "range"
    PYTHON = "python"


_KINDS = {
    "kernel": Kind.KERNEL,
    "concurrent_kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "memcpy": Kind.COPY,
    "memset": Kind.COPY,
    "cpu_op": Kind.OPERATION,
    "operator": Kind.OPERATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "user_annotation": Kind.RANGE,
    "trace": Kind.RANGE,
    "python_function": Kind.PYTHON,
}
"""By Kineto's category in lower case, the older names among them. `trace` is the profiler's own time. `gpu_user_annotation` and `cuda_sync` are no work of a device."""
_KINDS_BY_PROCESS = {"CPU functions": Kind.OPERATION, "CUDA functions": Kind.KERNEL}
"""Of the traces that torch.autograd.profiler writes without Kineto, which have no categories."""
_RANGE_NAMES = re.compile(r"ProfilerStep|enumerate\(DataLoader\)|Optimizer\.|## ")
"""Beginnings of ranges that older versions file as operations."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `thread` is its host thread or the device's stream."""

    kind: Kind
    name: str
    start_us: float
    end_us: float
    thread: tuple[Any, Any]
    args: Mapping[str, Any]

    @property
    def duration_us(self) -> float:
        """Its length."""
        return self.end_us - self.start_us

    @property
    def device(self) -> int:
        """The number of the device of a kernel or copy, 0 where the trace has none."""
        found = self.args.get("device", self.thread[0])
        return found if isinstance(found, int) else 0

    @property
    def correlation(self) -> int | None:
        """The number that a launch and its kernel share."""
        found = self.args.get("correlation")
        return found if isinstance(found, int) else None

    @property
    def is_on_device(self) -> bool:
        """Whether it is the work of a GPU."""
        return self.kind in {Kind.KERNEL, Kind.COPY}


@dataclass(frozen=True, slots=True)
class Measured:
    """What `record` noted: the device's limits in a dtype (fp32 or bf16), and FLOPs and bytes of all calls of operations without shapes."""

    dtype: str
    flops_per_s: float
    bytes_per_s: float
    operations: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's events by their start, longest first; device names by number, as the driver reports them."""

    path: Path
    rank: int
    events: Sequence[Event]
    device_names: Mapping[int, str] = field(default_factory=dict)
    measured: Measured | None = None
    notes: Sequence[str] = ()

    @property
    def is_of_gpu(self) -> bool:
        """Whether a GPU did any of the work."""
        return any(event.is_on_device for event in self.events)

    def of(self, *kinds: Kind) -> list[Event]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """Read the ranks of these files, by rank; files that name none, or the same, are numbered in the order given. Raises InvalidRequest."""
    traces = [trace for path in paths for trace in _read(path)]
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        return [
            Trace(one.path, number, one.events, one.device_names, one.measured, one.notes)
            for number, one in enumerate(traces)
        ]
    return sorted(traces, key=lambda one: one.rank)


def _read(path: Path) -> list[Trace]:
    if not path.is_file():
        raise InvalidRequest(_FIELD, f"there is no file {path}", "give a file that a profiler wrote")
    with path.open("rb") as file:
        head = file.read(len(_SQLITE))
    if not head:
        raise InvalidRequest(_FIELD, f"{path} is empty", "record it again, and export it after the profiler has ended")
    traces = _read_nsys(path) if head == _SQLITE else [_read_json(path, is_gzip=head.startswith(_GZIP))]
    for trace in traces:
        if not any(event.is_on_device or event.kind is Kind.OPERATION for event in trace.events):
            raise InvalidRequest(
                _FIELD,
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
            _FIELD, f"{path} is JSON without a list of traceEvents", "give a trace of torch's profiler or Chrome's"
        )
    left_out: Counter[str] = Counter()
    events = _placed(_events(raw, left_out))
    distributed = about.get("distributedInfo")
    rank = distributed.get("rank", 0) if isinstance(distributed, dict) else 0
    properties = about.get("deviceProperties")
    names = {
        one["id"]: str(one["name"])
        for one in (properties if isinstance(properties, list) else ())
        if isinstance(one, dict) and isinstance(one.get("id"), int) and "name" in one
    }
    return Trace(
        path,
        rank if isinstance(rank, int) else 0,
        events,
        names,
        _measured(about.get(OUR_METADATA)),
        [f"{number} events were left out: {why}" for why, number in left_out.items()],
    )


def _json_of(path: Path, *, is_gzip: bool) -> Any:
    again = "copy it again, or record it again and wait for the export to end"
    try:
        content = gzip.decompress(path.read_bytes()) if is_gzip else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidRequest(_FIELD, f"{path} ends in the middle, or is damaged ({error})", again) from error
    text = content.decode(errors="replace")
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        whole = text.rstrip()
        is_cut = error.pos > 0 and (error.pos >= len(whole) - 1 or not whole.endswith(("}", "]")))
        what = "ends in the middle" if is_cut else f"is no JSON at line {error.lineno}, column {error.colno}"
        raise InvalidRequest(
            _FIELD, f"{path} {what}", again if is_cut else "give a trace that a profiler exported"
        ) from error
    except RecursionError as error:
        raise InvalidRequest(_FIELD, f"{path} is nested too deeply", "give a trace that a profiler exported") from error


def _events(raw: Iterable[Any], left_out: Counter[str]) -> Iterator[Event]:
    """Yield the events that can be placed. Pairs of begin and end are matched within their thread."""
    open_events: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in raw:
        if not isinstance(one, dict):
            left_out["no object"] += 1
            continue
        phase = one.get("ph")
        if phase == "B":
            open_events.setdefault(_lane(one), []).append(one)
        elif phase == "E":
            begun = open_events.get(_lane(one))
            if begun:
                first = begun.pop()
                yield from _event(first, _number(one.get("ts")) - _number(first.get("ts")), left_out)
        elif phase == "X":
            yield from _event(one, _number(one.get("dur")), left_out)


def _event(one: Mapping[str, Any], duration_us: float, left_out: Counter[str]) -> Iterator[Event]:
    kind = _kind_of(one)
    if kind is None:
        return
    start_us = _number(one.get("ts"))
    if not math.isfinite(start_us) or not math.isfinite(duration_us):
        left_out["a time is missing or no number"] += 1
    elif duration_us < 0:
        left_out["a duration is negative"] += 1
    else:
        args = one.get("args")
        thread = (_hashable(one.get("pid")), _hashable(one.get("tid")))
        yield Event(
            kind,
            str(one.get("name", "")),
            start_us,
            start_us + duration_us,
            thread,
            args if isinstance(args, dict) else {},
        )


def _measured(noted: Any) -> Measured | None:
    """Return what our recorder noted, None where there is nothing of its kind."""
    if not isinstance(noted, dict) or not isinstance(noted.get("operations"), dict):
        return None
    flops_per_s, bytes_per_s = (_number(noted.get(name)) for name in ("flops_per_s", "bytes_per_s"))
    if not (0 < flops_per_s < math.inf and 0 < bytes_per_s < math.inf):
        return None
    operations = {
        name: (_number(cost[0]), _number(cost[1]))
        for name, cost in noted["operations"].items()
        if isinstance(cost, list) and len(cost) == 2
    }
    known = {name: cost for name, cost in operations.items() if cost[0] >= 0 and 0 < cost[1] < math.inf}
    return Measured(str(noted.get("dtype")), flops_per_s, bytes_per_s, known)


def _kind_of(one: Mapping[str, Any]) -> Kind | None:
    name = str(one.get("name", ""))
    kind = _KINDS.get(str(one["cat"]).lower()) if "cat" in one else _KINDS_BY_PROCESS.get(str(one.get("pid")))
    if kind is Kind.OPERATION and _RANGE_NAMES.match(name):
        return Kind.RANGE
    return Kind.OPERATION if kind is Kind.RANGE and name.startswith(f"{OUR_METADATA}::") else kind


def _lane(one: Mapping[str, Any]) -> tuple[str, str]:
    return str(one.get("pid")), str(one.get("tid"))


def _hashable(value: Any) -> Any:
    return value if isinstance(value, int | str) else str(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _placed(events: Iterable[Event]) -> list[Event]:
    """Return the events by their start, those that enclose others first, with times from the first one on."""
    found = sorted(events, key=lambda event: (event.start_us, -event.end_us))
    origin_us = found[0].start_us if found else 0.0
    return [
        Event(one.kind, one.name, one.start_us - origin_us, one.end_us - origin_us, one.thread, one.args)
        for one in found
    ]


_PROCESS_OF_THREAD = ~0xFFFFFF
"""nsys puts the thread into the lowest 24 bits of `globalTid`; the rest is the process, as in `globalPid`."""
_DEVICE_ROWS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": Kind.KERNEL,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": Kind.KERNEL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": Kind.COPY,
    "CUPTI_ACTIVITY_KIND_MEMSET": Kind.COPY,
}
_HOST_ROWS = {"CUPTI_ACTIVITY_KIND_RUNTIME": Kind.RUNTIME, "NVTX_EVENTS": Kind.RANGE}
"""Tables of an nsys report, as NVIDIA's "SQLite Export Schema Reference" lists them. Each exists only where something was recorded."""


def _read_nsys(path: Path) -> list[Trace]:
    """Read the processes that used a device. Its times are nanoseconds."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
            base.row_factory = sqlite3.Row
            tables = {str(row["name"]) for row in base.execute("SELECT name FROM sqlite_master")}
            strings = {row["id"]: row["value"] for row in _rows(base, tables, "StringIds")}
            names = {row["id"]: str(row["name"]) for row in _rows(base, tables, "TARGET_INFO_GPU")}
            by_process: dict[int, list[Event]] = {}
            left_out: Counter[str] = Counter()
            for table, kind in (_DEVICE_ROWS | _HOST_ROWS).items():
                for row in _rows(base, tables, table):
                    process, event = _nsys_event(table, kind, row, strings)
                    left_out["a time is missing or a duration is negative"] += event is None and kind is not Kind.RANGE
                    if event is not None:
                        by_process.setdefault(process, []).append(event)
    except sqlite3.DatabaseError as error:
        raise InvalidRequest(
            _FIELD, f"{path} is a damaged SQLite file ({error})", "run `nsys export --type sqlite` again"
        ) from error
    except (IndexError, KeyError) as error:
        raise InvalidRequest(
            _FIELD, f"{path} lacks a column of nsys's schema ({error})", "export it with `nsys export --type sqlite`"
        ) from error
    ranks = [one for _, one in sorted(by_process.items()) if any(event.is_on_device for event in one)]
    if not ranks:
        raise InvalidRequest(
            _FIELD, f"{path} holds no activity of a device", "record with `nsys profile --trace=cuda,nvtx`"
        )
    notes = [f"{number} events were left out: {why}" for why, number in left_out.items() if number]
    return [Trace(path, rank, _placed(events), names, None, notes) for rank, events in enumerate(ranks)]


def _rows(base: sqlite3.Connection, tables: set[str], table: str) -> list[sqlite3.Row]:
    return base.execute(f"SELECT * FROM {table}").fetchall() if table in tables else []  # noqa: S608 (a name of ours)


def _nsys_event(table: str, kind: Kind, row: sqlite3.Row, strings: Mapping[int, str]) -> tuple[int, Event | None]:
    columns = set(row.keys())
    on_device = table in _DEVICE_ROWS
    process = (
        row["globalPid"]
        if on_device and "globalPid" in columns
        else row["globalTid"] & _PROCESS_OF_THREAD
        if "globalTid" in columns
        else 0
    )
    start_us, end_us = (_number(row[name]) / 1_000 for name in ("start", "end"))
    if not start_us <= end_us:
        return process, None
    if on_device:
        thread = (row["deviceId"], row["streamId"])
        args = {"device": row["deviceId"]}
    else:
        thread, args = (process, row["globalTid"]), {}
    name = _nsys_name(table, row, columns, strings)
    if kind is Kind.RANGE and name.startswith("aten::"):  # torch.autograd.profiler.emit_nvtx
        kind, name = Kind.OPERATION, name.partition(",")[0]
    return process, Event(kind, name, start_us, end_us, thread, args)


def _nsys_name(table: str, row: sqlite3.Row, columns: set[str], strings: Mapping[int, str]) -> str:
    if "text" in columns and row["text"]:
        return str(row["text"])
    for column in ("demangledName", "shortName", "nameId", "textId"):
        if column in columns and row[column] is not None:
            return strings.get(row[column], "")
    return table.rpartition("_")[2].lower()
