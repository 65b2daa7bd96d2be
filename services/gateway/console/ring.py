"""The last samples of the node's metrics: a ring that gives windows and steps. Pure: time comes with the samples.

The newest samples are all kept; older ones are thinned out, so that an hour of them takes a few megabytes.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from services.gateway.console.counts import Counts

SLACK_S = 0.05


class Ring:
    """Samples, oldest first: all of the last `fine_s` seconds, and of the last `keep_s` one per `thin_s` seconds."""

    def __init__(self, fine_s: float, keep_s: float, thin_s: float) -> None:
        self._fine_s = fine_s
        self._keep_s = keep_s
        self._thin_s = thin_s
        self._fine: deque[Counts] = deque()
        self._coarse: deque[Counts] = deque()

    def add(self, sample: Counts) -> None:
        """Add a sample, newer than all before."""
        self._fine.append(sample)
        while self._age_s(self._fine[0]) > self._fine_s + SLACK_S:
            self._retire(self._fine.popleft())
        while self._coarse and self._age_s(self._coarse[0]) > self._keep_s + SLACK_S:
            self._coarse.popleft()

    def window(self, length_s: float) -> Counts | None:
        """Return what was counted in the last `length_s` seconds, or in fewer when there are fewer. None before two samples."""
        inside = self._last(length_s)
        return inside[-1].since(inside[0]) if len(inside) > 1 else None

    def steps(self, length_s: float) -> Iterator[Counts]:
        """Return what was counted between each two neighbours of the last `length_s` seconds, oldest first."""
        inside = self._last(length_s)
        for before, after in pairwise(inside):
            yield after.since(before)

    def _retire(self, sample: Counts) -> None:
        if not self._coarse or sample.at_s - self._coarse[-1].at_s >= self._thin_s - SLACK_S:
            self._coarse.append(sample)

    def _last(self, length_s: float) -> list[Counts]:
        return [sample for sample in (*self._coarse, *self._fine) if self._age_s(sample) <= length_s + SLACK_S]

    def _age_s(self, sample: Counts) -> float:
        return self._fine[-1].at_s - sample.at_s
