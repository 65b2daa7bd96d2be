"""When the record of each resident name is read: once in an interval, and spread over it. Pure; times are arguments."""

import math
from bisect import bisect_left, insort
from itertools import pairwise


class PollTurns:
    """The next poll of each name. A name's first poll is at most an interval after it was added."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._polls: list[tuple[float, str]] = []
        """The next polls, in order of time."""
        self._due_s: dict[str, float] = {}
        self._earliest_s = -math.inf

    @property
    def next_s(self) -> float:
        """The time of the next poll; infinity without names. Late polls, as of a stopped process, follow each other."""
        return max(self._polls[0][0], self._earliest_s) if self._polls else math.inf

    def add(self, name: str, now_s: float) -> None:
        """Poll a name from now on, first in the middle of the longest pause between the polls of the next interval."""
        times_s = [now_s, *(min(max(at_s, now_s), now_s + self._interval_s) for at_s, _ in self._polls)]
        pauses = pairwise([*times_s, now_s + self._interval_s])
        begin_s, end_s = max(pauses, key=lambda pause: pause[1] - pause[0])
        self._schedule(name, (begin_s + end_s) / 2)

    def remove(self, name: str) -> None:
        """Poll a name no longer."""
        due_s = self._due_s.pop(name)
        del self._polls[bisect_left(self._polls, (due_s, name))]

    def take(self, now_s: float) -> str | None:
        """Return the name to poll now, which is polled again after an interval; None if no poll is due."""
        if self.next_s > now_s:
            return None
        _, name = self._polls.pop(0)
        self._schedule(name, now_s + self._interval_s)
        self._earliest_s = now_s + self._interval_s / (2 * len(self._polls))
        return name

    def _schedule(self, name: str, due_s: float) -> None:
        self._due_s[name] = due_s
        insort(self._polls, (due_s, name))
