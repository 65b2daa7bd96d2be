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
        calls = {one.correlation: one.thread for one in trace.of(ActivityKind.RUNTIME) if one.correlation is not None}
        if trace.is_of_gpu:
            work = trace.of(ActivityKind.KERNEL, ActivityKind.COPY)
            found = [None if one.correlation is None else calls.get(one.correlation) for one in work]
        else:
            work = trace.of(ActivityKind.OPERATION)
            found = [one.thread for one in work]
        self._usual = Counter(one for one in found if one is not None) or _busiest(trace)
        self._main = self._usual.most_common(1)[0][0] if self._usual else ("", "")
        self._starts = np.array([one.start_us for one in work])
        self._launchers = [self._main if one is None else one for one in found]

    def of_gaps(self, gaps: Intervals) -> list[Thread]:
        """Return the thread of each gap."""
        after = np.searchsorted(self._starts, gaps[:, 1] - _ROUNDING_US, side="left")
        return [self._launchers[place] if place < len(self._launchers) else self._main for place in after]

    def divide(self, gaps: Intervals) -> dict[Thread, Intervals]:
        """Return the gaps of each thread."""
        places: dict[Thread, list[int]] = defaultdict(list)
        for place, thread in enumerate(self.of_gaps(gaps)):
            places[thread].append(place)
        return {thread: gaps[of_thread] for thread, of_thread in places.items()}


def _busiest(trace: Trace) -> Counter[Thread]:
    """Count the events of each thread, of the first kind that is recorded."""
    for kind in (ActivityKind.RUNTIME, ActivityKind.OPERATION, ActivityKind.RANGE, ActivityKind.PYTHON):
        events = trace.of(kind)
        if events:
            return Counter(one.thread for one in events)
    return Counter()
