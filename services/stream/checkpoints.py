"""Writes applied events to the offline log in a thread of its own, then commits: later events do not wait for the disk.

Store and consumer are used only from the worker's thread, which commits once the files are on disk.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import structlog

from services.errors import DependencyUnavailable
from services.features.ownership import Partitions, PartitionWrite
from services.stream.continuity import saved
from services.stream.effects import Pending
from services.stream.log.offline_log import OfflineLog
from services.stream.partition_consumer import PartitionConsumer
from services.stream.report import LogStep, WorkerReport

_log = structlog.get_logger()


class LogCheckpoints:
    """At most one batch of events on its way to the disk. All methods are called from the worker's thread."""

    def __init__(
        self,
        log: OfflineLog,
        partitions: Partitions,
        report: WorkerReport,
        renew: Callable[[], None],
        before_commit: Callable[[], None],
    ) -> None:
        """Take the collaborators. `renew` renews the leases, and raises OwnershipLost or DependencyUnavailable."""
        self._log = log
        self._partitions = partitions
        self._report = report
        self._renew = renew
        self._before_commit = before_commit
        self._thread = ThreadPoolExecutor(1, "log")
        self._writing: tuple[Pending, Future[None]] | None = None

    def begin(self, pending: Pending) -> None:
        """Start to write what waits now, after renewing the leases, unless a batch is being written.

        Raises OwnershipLost.
        """
        if self._writing is None and pending.last:
            if pending.has_effects:
                with suppress(DependencyUnavailable):
                    self._renew()
            batch = pending.copy()
            self._writing = batch, self._thread.submit(self._write, batch)

    def finish(self, consumer: PartitionConsumer, pending: Pending) -> None:
        """Commit the batch if it is on disk. If the disk refuses, its events wait for the next checkpoint.

        Raises OwnershipLost or DependencyUnavailable.
        """
        if self._writing is None or not self._writing[1].done():
            return
        (batch, written), self._writing = self._writing, None
        try:
            written.result()
        except OSError as error:
            pending.is_refused = True
            self._report.log_failed(LogStep.APPEND, error, num_events=batch.num_events)
            return
        self._before_commit()
        try:
            self._partitions.write_all([self._saved(number, batch) for number in batch.last])
        except DependencyUnavailable as error:  # the next checkpoint writes it
            _log.warning("stream.checkpoint_not_written", error=str(error))
        consumer.commit(batch.positions)
        pending.remove(batch)

    def complete(self, consumer: PartitionConsumer, pending: Pending) -> None:
        """Write and commit all events, and wait for it. Raises OwnershipLost or DependencyUnavailable."""
        self.wait()
        self.finish(consumer, pending)
        self.begin(pending)
        self.wait()
        self.finish(consumer, pending)

    def save(self, pending: Pending) -> None:
        """Write all events without a commit, and wait for it. Raises OwnershipLost or OSError."""
        self.wait()
        if pending.has_effects:
            with suppress(DependencyUnavailable):
                self._renew()
        self._write(pending)

    def wait(self) -> None:
        """Wait until no batch is being written."""
        if self._writing is not None:
            self._writing[1].exception()

    def forget(self) -> None:
        """Wait, and forget the batch: its events are read again."""
        self.wait()
        self._writing = None

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, batch: Pending) -> None:
        """Write erasures, then events, which are filtered by them. Raises OSError."""
        for partition, erasures in batch.erasures.items():
            self._log.ledger.append(erasures, self._log.topic_ids(partition))
        for events in batch.by_partition.values():
            self._log.append(events)

    def _saved(self, partition: int, batch: Pending) -> PartitionWrite:
        """Return the record of the data on disk; the position moves only over records without an effect on rows."""
        last, applied = batch.last[partition], self._partitions.position(partition)
        at = last.last_position
        is_applied = applied is not None and applied.covers(at)
        return PartitionWrite(
            partition,
            position=None if is_applied else at,
            state={"saved": saved(at)},
            leader_epoch=None if is_applied else last.leader_epoch,
        )
