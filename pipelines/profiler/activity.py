"""Activity of a rank over time: intervals of computing, communicating and copying, and the causes of gaps.

**GPU traces.** Activity is the kernels, copies and fills of all streams and devices of the rank. Ranges,
synchronisations and host calls are not activity. The span goes from the first to the last activity.

**CPU-only traces.** The CPU is the device: activity is the torch operations on every thread. An operation that calls
others has the time left between them; a wrapper (an autograd node, a range) does no work. Operations inside a loader's
range prepare input and are not activity. The span goes from the first to the last operation or range, including the
profiler's, so that a wait before the first operation counts. Device copies do not exist; `aten::copy_` is bound by
memory.

A CPU also runs other work. Its interference inside a tiny operation, or between two operations, looks like a large
operation or a wait. So an operation is all dispatch if almost all of its calls cost no more than dispatch. A long gap
at a place where gaps are usually short is an interruption: it counts as the host's and is excluded from the verdict.

**Gaps** are attributed to one thread: the thread that launched the activity ending the gap (`threads.py`). Loaders,
writers and monitors wait on their own threads all the time. Gap time within a loader's range of that thread is a wait
for data. A gap shorter than `LONG_GAP_US` is a launch gap: the host was preparing the next operation. In a longer gap,
the thread's Python frames or operations tell what the host did. Without records, the host of a GPU was busy in
code that torch does not see. On a CPU, such a gap after the start of a collective is a wait for other ranks; any other
is a wait for
data: the processor did nothing for torch, and input is what a step most often waits for.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.profiler.events import ActivityKind, Trace, TraceEvent
from pipelines.profiler.intervals import NONE, Intervals, intersect, longer_than, subtract, total, union, union_of
from pipelines.profiler.kernels import Bound
from pipelines.profiler.names import (
    is_communication,
    is_input,
    is_input_frame,
    is_other_work,
    is_waiting_frame,
    is_wrapper,
)
from pipelines.profiler.operations import bounds_of
from pipelines.profiler.threads import Thread, Threads

LONG_GAP_US = 1_000.0
"""A launch takes 5 to 50 us, Python between two launches rarely over 200; reads, sleeps, queues take milliseconds."""
DISPATCH_US = 8.0
"""An operation with 20 or more calls is tiny if at most this fraction (and two) exceed ten times `DISPATCH_US`."""
_MANY, _RARE = 20, 0.003
"""A long gap is a wait if at least this fraction of the gaps between the same two operations is long."""
_OFTEN = 0.34
"""A long gap is a wait if at least this fraction of the gaps between the same two operations is long."""
_MOST = 0.5
"""A frame or call explains a gap if it covers this fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Unions of intervals within the span. The first five may overlap; the last three are disjoint and fill gaps."""

    start_us: float
    end_us: float
    compute: Intervals
    memory: Intervals
    dispatch: Intervals
    """The fixed cost of operations on a CPU."""
    communication: Intervals
    copy: Intervals
    launch: Intervals
    data_wait: Intervals
    host: Intervals
    unrecorded_us: float
    """Part of the data wait that was assigned for lack of records."""
    interrupted_us: float
    """Part of the host's time that does not recur at its place."""
    unknown_us: float
    """Part of the memory-bound time whose bound neither a name nor shapes tell."""

    @property
    def busy(self) -> Intervals:
        """When anything computes."""
        return union(self.compute, self.memory, self.dispatch)


def activity_of(trace: Trace, device: int | None = None) -> Activity:
    """Return the activity of a rank, on one of its devices or on all."""
    return _of_gpu(trace, device) if trace.is_of_gpu else _of_cpu(trace)


def _of_gpu(trace: Trace, device: int | None) -> Activity:
    events = [
        event for event in trace.of(ActivityKind.KERNEL, ActivityKind.COPY) if device is None or event.device == device
    ]
    kernels = [event for event in events if event.kind is ActivityKind.KERNEL]
    collectives = [kernel for kernel in kernels if is_communication(kernel.name)]
    others = [kernel for kernel in kernels if not is_communication(kernel.name)]
    bound = bounds_of(trace, others)
    span = (min(event.start_us for event in events), max(event.end_us for event in events))
    of = {kind: _union(kernel for kernel, its in zip(others, bound, strict=True) if its is kind) for kind in Bound}
    sets = {
        "compute": of[Bound.COMPUTE],
        "memory": union(of[Bound.MEMORY], of[Bound.UNKNOWN]),
        "dispatch": NONE,
        "communication": _union(collectives),
        "copy": _union(event for event in events if event.kind is ActivityKind.COPY),
    }
    unknown = subtract(of[Bound.UNKNOWN], union(of[Bound.COMPUTE], of[Bound.MEMORY]))
    return _with_gaps(trace, span, sets, trace.of(ActivityKind.OPERATION, ActivityKind.RUNTIME), unknown)


def _of_cpu(trace: Trace) -> Activity:
    recorded = trace.of(ActivityKind.OPERATION, ActivityKind.RANGE)
    loading = _loading(trace)
    collectives = [event for event in recorded if is_communication(event.name)]
    work = own_times(trace)
    bound = bounds_of(trace, [event for event, _ in work])
    tiny = _tiny(work)
    by_kind: dict[str, dict[Thread, list[tuple[float, float]]]] = {
        name: defaultdict(list) for name in ("dispatch", *Bound)
    }
    for (event, pieces), its_bound in zip(work, bound, strict=True):
        left_us = math.inf if _same(event) in tiny else DISPATCH_US
        for start_us, end_us in pieces:
            middle_us = min(start_us + left_us, end_us)
            left_us -= middle_us - start_us
            by_kind["dispatch"][event.thread].append((start_us, middle_us))
            by_kind[its_bound][event.thread].append((middle_us, end_us))
    of = {
        name: union(*(subtract(union_of(pairs), loading.get(thread, NONE)) for thread, pairs in by_thread.items()))
        for name, by_thread in by_kind.items()
    }
    sets = {
        "compute": of[Bound.COMPUTE],
        "memory": union(of[Bound.MEMORY], of[Bound.UNKNOWN]),
        "dispatch": of["dispatch"],
        "communication": _union(collectives),
        "copy": NONE,
    }
    span = (min(event.start_us for event in recorded), max(event.end_us for event in recorded))
    unknown = subtract(of[Bound.UNKNOWN], union(of[Bound.COMPUTE], of[Bound.MEMORY]))
    return _with_gaps(trace, span, sets, [event for event in recorded if event.kind is ActivityKind.OPERATION], unknown)


def _loading(trace: Trace) -> dict[Thread, Intervals]:
    """Return each thread's intervals within a loader's range."""
    by_thread: dict[Thread, list[TraceEvent]] = defaultdict(list)
    for event in trace.of(ActivityKind.RANGE, ActivityKind.OPERATION):
        if is_input(event.name):
            by_thread[event.thread].append(event)
    return {thread: _union(events) for thread, events in by_thread.items()}


def _same(event: TraceEvent) -> tuple[str, str]:
    """Return the key of calls of equal size: the name, and the shapes if recorded."""
    return event.name, str(event.args.get("Input Dims", ""))


def _tiny(work: Sequence[tuple[TraceEvent, list[tuple[float, float]]]]) -> set[tuple[str, str]]:
    """Return the operations with many calls if almost all of them cost no more than dispatch."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event, pieces in work:
        times[_same(event)].append(sum(end_us - start_us for start_us, end_us in pieces))
    tiny = set()
    for same, of_us in times.items():
        num_long = sum(call_us > 10 * DISPATCH_US for call_us in of_us)
        is_small = np.percentile(of_us, 90) <= DISPATCH_US and num_long <= max(2, _RARE * len(of_us))
        if len(of_us) >= _MANY and is_small:
            tiny.add(same)
    return tiny


def own_times(trace: Trace) -> list[tuple[TraceEvent, list[tuple[float, float]]]]:
    """Return the CPU operations that do work themselves, each with the pieces of its time outside its callees."""
    threads: dict[object, list[TraceEvent]] = defaultdict(list)
    for event in trace.of(ActivityKind.OPERATION, ActivityKind.RANGE):
        threads[event.thread].append(event)
    own = []
    for events in threads.values():
        for event, pieces in _own_pieces(events):
            if pieces and not is_wrapper(event.name) and not is_communication(event.name):
                own.append((event, pieces))
    return own


def _own_pieces(events: Sequence[TraceEvent]) -> list[tuple[TraceEvent, list[tuple[float, float]]]]:
    """Divide a thread's time among nested events; a moment belongs to the innermost. Events are sorted, outer first."""
    pieces: list[tuple[TraceEvent, list[tuple[float, float]]]] = [(event, []) for event in events]
    stack: list[tuple[TraceEvent, list[tuple[float, float]]]] = []
    reached_us = 0.0

    def until(end_us: float) -> None:
        nonlocal reached_us
        if end_us > reached_us:
            stack[-1][1].append((reached_us, end_us))
            reached_us = end_us

    for event_pieces in pieces:
        while stack and stack[-1][0].end_us <= event_pieces[0].start_us:
            until(stack[-1][0].end_us)
            stack.pop()
        if stack:
            until(event_pieces[0].start_us)
        reached_us = max(reached_us, event_pieces[0].start_us)
        stack.append(event_pieces)
    while stack:
        until(stack[-1][0].end_us)
        stack.pop()
    return pieces


def _with_gaps(
    trace: Trace,
    span: tuple[float, float],
    sets: dict[str, Intervals],
    recorded: Sequence[TraceEvent],
    unknown: Intervals,
) -> Activity:
    whole = np.array([span])
    idle = subtract(whole, union(*sets.values()))
    threads, loading = Threads(trace), _loading(trace)
    waits = union(
        *(intersect(gaps, loading[thread]) for thread, gaps in threads.divide(idle).items() if thread in loading)
    )
    rest = subtract(idle, waits)
    is_long = longer_than(rest, LONG_GAP_US)
    recurs = is_long if trace.is_of_gpu else _recurs(is_long, rest, recorded)
    long_gaps = _Host(trace, recorded, threads).explain(rest[is_long], recurs[is_long])
    return Activity(
        start_us=span[0],
        end_us=span[1],
        compute=sets["compute"],
        memory=sets["memory"],
        dispatch=sets["dispatch"],
        communication=union(sets["communication"], long_gaps["communication"]),
        copy=sets["copy"],
        launch=rest[~is_long],
        data_wait=union(waits, long_gaps["data"], long_gaps["unrecorded"]),
        host=union(long_gaps["host"], long_gaps["interrupted"]),
        unrecorded_us=total(long_gaps["unrecorded"]),
        interrupted_us=total(long_gaps["interrupted"]),
        unknown_us=total(unknown),
    )


def _recurs(is_long: np.ndarray, gaps: Intervals, recorded: Sequence[TraceEvent]) -> np.ndarray:
    """Return whether gaps between the same two operations are often long, for each gap."""
    starts = np.array([event.start_us for event in recorded])
    before = np.searchsorted(starts, gaps[:, 0], side="left") - 1
    after = np.searchsorted(starts, gaps[:, 1] - 1e-3, side="left")
    names = [event.name for event in recorded]
    between = [
        (names[first] if first >= 0 else "", *names[last : last + 1]) for first, last in zip(before, after, strict=True)
    ]
    num_all, num_long = Counter(between), Counter(pair for pair, long in zip(between, is_long, strict=True) if long)
    return np.array([num_long[pair] >= _OFTEN * num_all[pair] for pair in between], dtype=bool)


class _Host:
    """Activity of the host during long gaps."""

    def __init__(self, trace: Trace, recorded: Sequence[TraceEvent], threads: Threads) -> None:
        self._threads = threads
        self._frames = _frames_by_thread(trace)
        self._recorded = _union(recorded)
        self._is_of_gpu = trace.is_of_gpu
        leaves = sorted(
            (event for event in recorded if event.kind is ActivityKind.OPERATION), key=lambda event: event.start_us
        )
        self._starts = np.array([leaf.start_us for leaf in leaves])
        self._leaves = leaves

    def explain(self, gaps: Intervals, recurs: np.ndarray) -> dict[str, Intervals]:
        """Divide gaps into waits for data, waits for other ranks, host work, interruptions, and unrecorded time."""
        parts: dict[str, list[Intervals]] = {
            name: [] for name in ("data", "communication", "host", "interrupted", "unrecorded")
        }
        for gap, does_recur, thread in zip(gaps, recurs, self._threads.of_gaps(gaps), strict=True):
            frame = self._frames[thread].explain(gap[0], gap[1]) if thread in self._frames else None
            interval = gap.reshape(1, 2)
            if not does_recur and frame not in {"data", "communication"}:
                parts["interrupted"].append(interval)
            elif frame is not None:
                parts[frame].append(interval)
            elif not self._is_of_gpu and self._follows_collective(gap[0]):
                parts["communication"].append(interval)
            else:
                silent = subtract(interval, self._recorded)
                silent = silent[longer_than(silent, LONG_GAP_US)]  # there is always a little time between operations
                parts["host"].append(interval if self._is_of_gpu else subtract(interval, silent))
                parts["unrecorded"].append(NONE if self._is_of_gpu else silent)
        return {name: union(*pieces) for name, pieces in parts.items()}

    def _follows_collective(self, start_us: float) -> bool:
        """Whether the last operation begun before is a collective, whose end the thread may wait for."""
        index = int(np.searchsorted(self._starts, start_us, side="right")) - 1
        return index >= 0 and is_communication(self._leaves[index].name)


def _frames_by_thread(trace: Trace) -> dict[Thread, "_Covering"]:
    frames: dict[Thread, list[TraceEvent]] = defaultdict(list)
    for event in trace.of(ActivityKind.PYTHON):
        frames[event.thread].append(event)
    return {thread: _Covering(events) for thread, events in frames.items()}


class _Covering:
    """The Python frames of one thread, by the cause of a gap that they indicate."""

    def __init__(self, frames: Sequence[TraceEvent]) -> None:
        self._frames = frames
        self._starts = np.array([frame.start_us for frame in frames])
        self._ends = np.array([frame.end_us for frame in frames])

    def explain(self, start_us: float, end_us: float) -> str | None:
        """Return `data`, `communication` or `host` by the innermost telling frame over most of a gap; None without one.

        A bare wait, such as a sleep or a read, is a wait for data unless an enclosing frame tells its purpose.
        """
        shared = np.minimum(self._ends, end_us) - np.maximum(self._starts, start_us)
        covering = [self._frames[int(index)] for index in np.flatnonzero(shared >= _MOST * (end_us - start_us))]
        for frame in reversed(covering):
            if "distributed" in frame.name and is_communication(frame.name):
                return "communication"
            if is_input_frame(frame.name) or is_other_work(frame.name):
                return "data" if is_input_frame(frame.name) else "host"
        if any(is_waiting_frame(frame.name) for frame in covering):
            return "data"
        return "host" if covering else None


def _union(events: Iterable[TraceEvent]) -> Intervals:
    return union_of((event.start_us, event.end_us) for event in events)
