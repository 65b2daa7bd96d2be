"""A stream worker's metrics and failure logs."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

import structlog

from services.observability.metrics import StreamMetrics
from services.stream.aggregate import AppliedEvents
from services.stream.decode import DeadLetter, LoggedInteraction

_log = structlog.get_logger()
_BEFORE_ERASURE = "before_erasure"
"""A reason in the metric of skipped events."""


class LogStep(StrEnum):
    """A use of the offline log that may fail without stopping the worker's other work."""

    OPEN = "open"
    APPEND = "append"
    COUNT = "count"
    UPKEEP = "upkeep"
    ERASE = "erase"


class WorkerReport:
    """The worker's view of its metrics."""

    def __init__(self, metrics: StreamMetrics, clock: Callable[[], float] = time.time) -> None:
        self._metrics = metrics
        self._clock = clock
        self._watched: set[int] = set()
        for step in LogStep:
            metrics.log_failures.labels(step)  # a rate needs the zero before the first failure

    def watch(self, partitions: Iterable[int]) -> None:
        """Start reporting the progress of these partitions; a partition without progress counts from now."""
        new = set(partitions) - self._watched
        self._watched |= new
        self.went_on(new)

    def went_on(self, partitions: Iterable[int]) -> None:
        """Report that records of these partitions were taken, or that none remain."""
        for partition in partitions:
            self._metrics.progress_time.labels(str(partition)).set(self._clock())

    def lag(self, behind: Mapping[int, int], unapplied: Sequence[LoggedInteraction]) -> None:
        """Report by partition the events that were not polled yet, and the events that wait for the store."""
        waiting = Counter(event.position.partition for event in unapplied)
        for partition, num_events in behind.items():
            self._metrics.lag.labels(str(partition)).set(num_events + waiting[partition])
        self.went_on(partition for partition, num_events in behind.items() if not num_events + waiting[partition])

    def applied(self, outcome: AppliedEvents, events: Sequence[LoggedInteraction]) -> None:
        """Report one user's events of a batch, and their latency if all were new."""
        self._metrics.applied.inc(outcome.num_applied)
        for reason in outcome.skipped:
            self._metrics.skipped.labels(reason).inc()
        if not outcome.skipped:
            for event in events:
                if event.interaction.accepted_time_ms is not None:
                    waited_s = self._clock() - event.interaction.accepted_time_ms / 1_000
                    self._metrics.visible_seconds.observe(max(0.0, waited_s))  # the gateway's clock may be ahead

    def late(self, num_events: int) -> None:
        """Report events from before the erasure of their user, which are dropped."""
        self._metrics.skipped.labels(_BEFORE_ERASURE).inc(num_events)

    def dead_lettered(self, dead: Sequence[DeadLetter]) -> None:
        """Report the dead letters."""
        self._metrics.dead_lettered.inc(len(dead))
        for letter in dead:
            if letter.record.undecodable is not None:
                self._metrics.undecodable.labels(letter.record.undecodable.cause).inc()
            _log.warning("stream.dead_letter", reason=letter.reason, position=str(letter.record.position))

    def rerouted(self, num_records: int) -> None:
        """Report records that were sent on to their users' partitions."""
        self._metrics.rerouted.inc(num_records)

    def log_failed(self, step: LogStep, error: BaseException, **facts: object) -> None:
        """Report that the offline log could not be written, read or maintained; the operation is retried."""
        self._metrics.log_failures.labels(step).inc()
        _log.error("stream.log_failed", step=step, error=repr(error), **facts)

    def unreadable(self, num_files: int) -> None:
        """Report the number of unreadable offline log files, which are skipped."""
        self._metrics.unreadable_files.set(num_files)
