"""The host thread that an idle device waited for: it launched the kernel or copy that ended the gap.

Kernels and copies identify their launch by its correlation number. On a CPU the operation that ends the gap runs on its
own thread. If neither is recorded, it is the thread with the most launches, else operations, ranges or frames.
"""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from pipelines.profiler.events import ActivityKind, Trace
from pipelines.profiler.intervals import Intervals

Thread = tuple[Any, Any]
_ROUNDING_US = 1e-3


class Threads:
    """The launching threads of one trace."""

    def __init__(self, trace: Trace) -> None:
        calls = {
            event.correlation: event.thread for event in trace.of(ActivityKind.RUNTIME) if event.correlation is not None
        }
        if trace.is_of_gpu:
            work = trace.of(ActivityKind.KERNEL, ActivityKind.COPY)
            launchers = [None if event.correlation is None else calls.get(event.correlation) for event in work]
        else:
            work = trace.of(ActivityKind.OPERATION)
            launchers = [event.thread for event in work]
        self._usual = Counter(thread for thread in launchers if thread is not None) or _busiest(trace)
        self._main = self._usual.most_common(1)[0][0] if self._usual else ("", "")
        self._starts = np.array([event.start_us for event in work])
        self._launchers = [self._main if thread is None else thread for thread in launchers]

    def of_gaps(self, gaps: Intervals) -> list[Thread]:
        """Return the thread of each gap."""
        after = np.searchsorted(self._starts, gaps[:, 1] - _ROUNDING_US, side="left")
        return [self._launchers[index] if index < len(self._launchers) else self._main for index in after]

    def divide(self, gaps: Intervals) -> dict[Thread, Intervals]:
        """Return the gaps of each thread."""
        places: dict[Thread, list[int]] = defaultdict(list)
        for index, thread in enumerate(self.of_gaps(gaps)):
            places[thread].append(index)
        return {thread: gaps[of_thread] for thread, of_thread in places.items()}


def _busiest(trace: Trace) -> Counter[Thread]:
    """Count the events of each thread, of the first kind that is recorded."""
    for kind in (ActivityKind.RUNTIME, ActivityKind.OPERATION, ActivityKind.RANGE, ActivityKind.PYTHON):
        events = trace.of(kind)
        if events:
            return Counter(event.thread for event in events)
    return Counter()
