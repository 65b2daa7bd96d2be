"""The periodic work of a stream worker: the period of each kind, and the kinds that run in one background thread.

The thread counts a week's log for popularity, and merges and removes files of the log. So a worker applies its first
event as soon as it has its partitions, however long the log is; popularity is published again once it is counted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from services.contracts.event_roles import EventRoles
from services.features.ownership import Claim
from services.features.schema import WINDOW_MS, PopularRow
from services.stream.decode import LoggedInteraction
from services.stream.log.offline_log import OfflineLog
from services.stream.popularity import ListedItems, PopularityCounter

_COUNTING_ROUNDS = 3
"""Each round counts the events logged during the previous round, so few events remain after the last round."""
_RETRY_EVERY_S = 30.0
"""Delay before an unreadable log is counted again."""
_CLOCK_STEP_MS = 60_000
"""Less than a bucket of the shortest window: a larger step back means that the clock was set."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The periods of the work that a worker does not do per batch."""

    checkpoint_every_s: float = 1.0
    checkpoint_impressions_every_s: float = 5.0
    """Each writes a file by partition: at 50 impressions a second, most of the processor time of an impression."""
    checkpoint_every_events: int = 10_000
    max_pending_events: int = 50_000
    """Maximum number of applied events that wait for the offline log; at the limit polling pauses. About 1 KB each."""
    popularity_every_s: float = 1.0
    popularity_at_least_every_s: float = 10.0
    """Period at which unchanged windows are written again, in case the store lost them."""
    popularity_num_items: int = 200
    lag_every_s: float = 1.0
    renew_every_s: float = 1.0
    """Period of renewing leases, detecting a restored store, and claiming free partitions."""
    compact_every_s: float = 5.0
    """Period of compacting files, one partition per step."""
    retry_after_s: float = 0.5
    erasure_settle_s: float = 10.0
    """How long after an erasure's acceptance an in-flight answer may still leave traces of the user."""
    erasure_rewrite_every_s: float = 60.0
    """Minimum time between two rewrites of Redis' file for erasures."""

    @property
    def timers_s(self) -> tuple[float, float, float]:
        """The periods of checkpoint, popularity and compaction."""
        return self.checkpoint_every_s, self.popularity_every_s, self.compact_every_s


DEFAULT_PACE = Pace()


class Timer:
    """A period on the monotonic clock: due once per `every_s`, first after one period."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock() + every_s

    def due(self) -> bool:
        """Return whether the period is over; if so, start the next period."""
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True


class Chores:
    """Periodic jobs of a loop, in turn: at most one per call, so that an event waits for one at most."""

    def __init__(self, *chores: tuple[Timer, Callable[[], None]]) -> None:
        self._chores = deque(chores)

    def work(self, *, at_once: bool) -> None:
        """Do the next due job; with `at_once` all due jobs."""
        for _ in range(len(self._chores)):
            timer, job = self._chores[0]
            self._chores.rotate(-1)
            if timer.due():
                job()
                if not at_once:
                    return


class PopularCounts:
    """Popularity of the owned partitions, counted from the log in the background and updated by the worker's thread."""

    def __init__(self, log: OfflineLog, items: ListedItems, roles: EventRoles, thread: ThreadPoolExecutor) -> None:
        """Take the log, the items to count, the roles of events, and the executor."""
        self._log = log
        self._items = items
        self._roles = roles
        self._thread = thread
        self._counts: dict[int, PopularityCounter] = {}
        self._counting: dict[int, Future[PopularityCounter]] = {}
        self._failed: set[int] = set()
        self._retry = Timer(_RETRY_EVERY_S)
        self._given_up = threading.Event()
        self._asked_ms = 0

    def own(self, claims: Mapping[int, Claim]) -> None:
        """Keep the counts of partitions that no other process has owned since; recount the last week of all others."""
        owned = set(claims)
        kept = {number for number, claim in claims.items() if claim.is_continued}
        self._counts = {number: counts for number, counts in self._counts.items() if number in kept}
        self._count(owned - set(self._counts))

    def forget(self) -> None:
        """Drop all counts: another process may have applied events. The next `own` counts again."""
        self._given_up.set()
        self._given_up = threading.Event()
        self._counting.clear()
        self._failed.clear()
        self._counts.clear()

    def add(self, events: Iterable[LoggedInteraction]) -> None:
        """Count applied events, except of partitions whose log is being counted."""
        for event in events:
            if event.position.partition in self._counts:
                self._counts[event.position.partition].add(event.event)

    def adopt(self, unlogged: Mapping[int, Sequence[LoggedInteraction]]) -> list[Exception]:
        """Take over finished counts, and add the log's newest events and the events that are not logged yet.

        Return why partitions could not be counted; their log is counted again after a delay.
        """
        failures: list[Exception] = []
        for partition in [number for number, counting in self._counting.items() if counting.done()]:
            try:
                counts = self._counting.pop(partition).result()
                for event in chain(self._logged_since(partition, counts), unlogged.get(partition, ())):
                    counts.add(event.event)
            except Exception as error:  # noqa: BLE001 - whatever ails the log, events are applied
                failures.append(error)
                self._failed.add(partition)
            else:
                self._counts[partition] = counts
        if self._retry.due() and self._failed:
            self._count({*self._counting, *self._failed})
        return failures

    def rows(self, now_ms: int, num_items: int) -> list[PopularRow]:
        """Return the windows of the counted partitions.

        Windows only slide forward: if the clock was set back, all are recounted.
        """
        if now_ms < self._asked_ms - _CLOCK_STEP_MS:
            owned = {*self._counts, *self._counting}
            self.forget()
            self._count(owned)
        self._asked_ms = now_ms
        return [
            PopularRow(partition=number, as_of_ms=now_ms, windows=counts.top(now_ms, num_items))
            for number, counts in self._counts.items()
        ]

    def _count(self, partitions: Iterable[int]) -> None:
        """Start counting the log of exactly these partitions; counts in progress continue."""
        self._counting = {
            number: self._counting.get(number) or self._thread.submit(self._count_week, number, self._given_up)
            for number in sorted(partitions)
        }
        self._failed.clear()

    def _count_week(self, partition: int, given_up: threading.Event) -> PopularityCounter:
        """Count the offline log's last week, then the events logged meanwhile. Runs in the background thread."""
        counts = PopularityCounter(self._items, roles=self._roles)
        counts.slide(time.time_ns() // 1_000_000)
        for _ in range(_COUNTING_ROUNDS):
            for event in self._logged_since(partition, counts):
                counts.add(event.event)
                if given_up.is_set():
                    return counts
        return counts

    def _logged_since(self, partition: int, counts: PopularityCounter) -> Iterator[LoggedInteraction]:
        return self._log.read(partition, time.time_ns() // 1_000_000 - WINDOW_MS["7d"], after=counts.position)


class LogUpkeep:
    """Merges and removes the log's files, one partition after another, in the background thread."""

    def __init__(self, log: OfflineLog[Any], thread: ThreadPoolExecutor, keep_days: int) -> None:
        """Take the log and the executor. Events are kept for `keep_days`; 0 keeps them for ever."""
        self._log = log
        self._thread = thread
        self._keep_days = keep_days
        self._last: Future[None] | None = None

    def begin_step(self, partition: int) -> BaseException | None:
        """Start a step for this partition unless the last step still runs.

        Return why the last step failed; its turn comes again.
        """
        if self._last is not None and not self._last.done():
            return None
        failure = self._last.exception() if self._last is not None else None
        self._last = self._thread.submit(self._step, partition)
        return failure

    def _step(self, partition: int) -> None:
        now_s = time.time()
        self._log.compact(partition, now_s)
        if self._keep_days:
            self._log.remove_days(partition, self._keep_days, now_s)
