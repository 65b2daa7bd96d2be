"""The event flow, top to bottom: claim, rebuild, poll, decode, apply to rows, and periodically log and commit.

At-least-once delivery, effect exactly once: rows are written before offsets are committed, and a row holds the last
applied offset, so a repeated delivery is skipped. The raw events wait in memory for the offline log, and offsets are
committed only after they are on disk; a crash in between costs a replay of seconds. While Redis is unavailable the
current batch is retried. While the log cannot be written, applied events wait, up to a bound at which polling pauses.
When the broker is unavailable the consumer is opened again, and uncommitted events are delivered again.

A write that the store refuses also restarts the flow, because another process owns the partition or the store has lost
writes: partitions are claimed again, the store is rebuilt, and events that were not logged yet are read from the broker
again.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from pathlib import Path

import structlog
from opentelemetry.trace import Span

from services.contracts.event_roles import DEFAULT_ROLES, EventRoles
from services.errors import DependencyUnavailable, OwnershipLost, ReplicaOnly, RowChanged
from services.features.ownership import Claim, PartitionWrite
from services.features.schema import PopularRow
from services.features.writer import FeatureWriter
from services.observability.metrics import StreamMetrics
from services.observability.tracing import Attributes, Tracing, span
from services.stream.aggregate import HistoryLimits
from services.stream.background import DEFAULT_PACE, Chores, LogUpkeep, Pace, PopularCounts, Timer
from services.stream.checkpoints import LogCheckpoints
from services.stream.continuity import Continuity
from services.stream.decode import DeadLetter, Decoded, LoggedInteraction, Misplaced, Record, decode
from services.stream.effects import NO_INTERRUPTIONS, HistoryEffects, Interruptions, Pending, do_nothing
from services.stream.erasure.eraser import Eraser
from services.stream.erasure.late import without_late
from services.stream.log.offline_log import OfflineLog
from services.stream.partition_consumer import PartitionConsumer
from services.stream.popularity import ListedItems
from services.stream.rebuild import Rebuild
from services.stream.report import LogStep, WorkerReport

_POLL_MS = 100
_log = structlog.get_logger()


class StreamWorker:
    """Applies the events of the owned partitions to the feature store. Runs in one thread."""

    def __init__(
        self,
        open_consumer: Callable[[], PartitionConsumer],
        writer: FeatureWriter,
        log: OfflineLog,
        items: ListedItems,
        base_table: Path,
        limits: HistoryLimits,
        metrics: StreamMetrics,
        pace: Pace = DEFAULT_PACE,
        interruptions: Interruptions = NO_INTERRUPTIONS,
        beat: Callable[[], None] = do_nothing,
        tracing: Tracing | None = None,
        keep_days: int = 0,
        roles: EventRoles = DEFAULT_ROLES,
        eraser: Eraser | None = None,
    ) -> None:
        """Keep the parts without connecting.

        `items` lists the items whose popularity is counted. `eraser` erases users from all other stores. `beat`, the
        heartbeat, is called in every iteration, also while a dependency is unavailable, but not while the store's
        server is a replica: it would keep no write of this worker.
        """
        self._open_consumer = open_consumer
        self._writer = writer
        self._log = log
        self._report = WorkerReport(metrics)
        self._pace = pace
        self._touch = beat
        self._is_cut_off = False
        self._tracing = tracing or Tracing()
        self._effects = HistoryEffects(writer, limits, roles, interruptions)
        self._eraser = eraser
        remove_restored = eraser.remove_restored if eraser is not None else None
        self._rebuild = Rebuild(base_table, log, writer, self._effects, self._stay_alive, remove_restored)
        self._continuity = Continuity(log, writer.partitions, metrics, self._stay_alive)
        self._renewal = Timer(pace.renew_every_s)
        self._lag = Timer(pace.lag_every_s)
        self._missing: tuple[int, ...] = ()
        self._background = ThreadPoolExecutor(1, "background")
        self._popularity = PopularCounts(log, items, roles, self._background)
        self._checkpoints = LogCheckpoints(
            log, writer.partitions, self._report, self._renew, interruptions.before_commit
        )
        self._log_upkeep = LogUpkeep(log, self._background, keep_days)
        self._published: dict[int, PopularRow] = {}

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, also while broker or store are unavailable; then checkpoint and return."""
        while not stop.is_set():
            try:
                with closing(self._open_consumer()) as consumer:
                    self._work(consumer, stop)
            except DependencyUnavailable as error:
                _log.warning("stream.consumer_lost", error=str(error))
                self._beat(error)
                stop.wait(self._pace.retry_after_s)
            except OSError as error:  # the folder of the offline log
                self._report.log_failed(LogStep.OPEN, error)
                self._beat()
                stop.wait(self._pace.retry_after_s)
            except (OwnershipLost, RowChanged) as error:
                _log.warning("stream.write_refused", error=str(error))
                self._popularity.forget()
                self._beat()
        self._popularity.forget()
        self._background.shutdown()
        self._checkpoints.close()
        if self._eraser is not None:
            self._eraser.close()
        self._writer.close()

    def _work(self, consumer: PartitionConsumer, stop: threading.Event) -> None:
        claims = self._claim(consumer, stop)
        self._report.watch(claims)
        self._log.forget()
        if self._eraser is not None:
            self._eraser.own(tuple(claims))
        self._rebuild.make_whole(claims, consumer.num_partitions, stop)
        self._popularity.own(claims)
        self._published.clear()
        consumer.assign(tuple(claims), partial(self._continuity.start, consumer, claims))
        _log.info("stream.consumer_opened", topic_id=consumer.topic_id, partitions=consumer.partitions)
        pending = Pending()
        owned = cycle(consumer.partitions)
        checkpoint, publish, compact = (Timer(every_s) for every_s in self._pace.timers_s)
        chores = Chores(
            (self._lag, partial(self._look_at_broker, consumer)),
            (checkpoint, partial(self._checkpoints.begin, pending)),
            (publish, self._publish),
            (compact, partial(self._keep_log, owned)),
        )
        try:
            while not stop.is_set() and not self._stay_alive():
                chores.work(at_once=pending.num_events == 0)
                records = self._poll(consumer, pending, stop)
                if records:
                    with self._batch_span(records):
                        if not self._take(consumer, records, pending, stop):
                            break
                for failure in self._popularity.adopt(pending.by_partition):
                    self._report.log_failed(LogStep.COUNT, failure)
                if self._is_much(pending):
                    self._checkpoints.begin(pending)
                self._checkpoints.finish(consumer, pending)
                self._erase(consumer)
            self._checkpoints.complete(consumer, pending)
        except DependencyUnavailable:
            self._checkpoints.save(pending)  # log applied events even if the consumer fails
            raise
        finally:
            self._checkpoints.forget()

    def _claim(self, consumer: PartitionConsumer, stop: threading.Event) -> dict[int, Claim]:
        """Own the wanted partitions that no other process owns; wait for the first."""
        while not stop.is_set():
            claimed = {number: self._writer.partitions.claim(number) for number in consumer.wanted}
            self._is_cut_off = False
            claims = {number: claim for number, claim in claimed.items() if claim is not None}
            missing = tuple(number for number in consumer.wanted if number not in claims)
            if missing != self._missing:
                _log.warning("stream.waiting_for_other_worker", partitions=missing)
            self._missing = missing
            if claims:
                return claims
            self._beat()
            stop.wait(self._pace.retry_after_s)
            consumer.check_topic()
        return {}

    def _beat(self, failure: DependencyUnavailable | None = None) -> None:
        """Call the heartbeat, unless the store's server was a replica at the last call."""
        if failure is not None:
            self._is_cut_off = isinstance(failure, ReplicaOnly)
        if not self._is_cut_off:
            self._touch()

    def _stay_alive(self) -> bool:
        """Call the heartbeat, and renew due leases; return whether a missing partition was claimed.

        Raises OwnershipLost.
        """
        self._beat()
        if not self._renewal.due():
            return False
        try:
            self._renew()
            return any(self._writer.partitions.claim(number) is not None for number in self._missing)
        except DependencyUnavailable as error:  # while the store is unavailable no other process can take a partition
            self._beat(error)
            return False

    def _renew(self) -> None:
        self._writer.partitions.write_all([PartitionWrite(partition) for partition in self._writer.partitions.owned])
        self._is_cut_off = False

    def _poll(self, consumer: PartitionConsumer, pending: Pending, stop: threading.Event) -> Sequence[Record]:
        """Return the next records; empty while too many applied events wait for the offline log."""
        if pending.num_events < self._pace.max_pending_events:
            return consumer.poll(_POLL_MS)
        stop.wait(_POLL_MS / 1_000)
        return ()

    def _take(
        self, consumer: PartitionConsumer, records: Sequence[Record], pending: Pending, stop: threading.Event
    ) -> bool:
        """Handle one batch; False when stopped before the store took it."""
        with span("decode"):
            decoded = self._decode(records, consumer.num_partitions, pending)
        self._dead_letter(consumer, decoded.dead)
        if decoded.misplaced:
            self._reroute(consumer, decoded.misplaced)
        if not self._apply_with_retries(consumer, decoded, stop):
            return False
        pending.add(records, decoded.events, decoded.erasures)
        self._popularity.add(decoded.events)
        self._report.went_on({record.position.partition for record in records})
        return True

    def _decode(self, records: Sequence[Record], num_partitions: int, pending: Pending) -> Decoded:
        """Decode a batch, without events from before the erasure of their user."""
        decoded = decode(records, num_partitions, _now_ms())
        erasures = chain(*pending.erasures.values(), decoded.erasures)
        events = without_late(decoded.events, erasures, self._log.ledger)
        self._report.late(len(decoded.events) - len(events))
        return replace(decoded, events=events)

    def _batch_span(self, records: Sequence[Record]) -> AbstractContextManager[Span]:
        """Open the span of a batch if any producer is traced."""
        attributes: Attributes = {
            "messaging.system": "kafka",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.batch.message_count": len(records),
        }
        return self._tracing.joint_entry(
            "process interactions", [record.trace for record in records if record.trace], attributes
        )

    def _dead_letter(self, consumer: PartitionConsumer, dead: Sequence[DeadLetter]) -> None:
        if dead:
            consumer.dead_letter(dead)
            self._report.dead_lettered(dead)

    def _reroute(self, consumer: PartitionConsumer, misplaced: Sequence[Misplaced]) -> None:
        too_large = consumer.reroute(misplaced)
        self._dead_letter(consumer, [misrouted.too_large for misrouted in too_large])
        self._report.rerouted(len(misplaced) - len(too_large))

    def _apply_with_retries(self, consumer: PartitionConsumer, decoded: Decoded, stop: threading.Event) -> bool:
        """Apply a batch, retrying while the store is unavailable; False when stopped before that succeeded."""
        events = decoded.events
        while events or decoded.erasures:
            try:
                for outcome, own in self._effects.apply(events, erasures=decoded.erasures):
                    self._report.applied(outcome, own)
                break
            except DependencyUnavailable as error:
                _log.warning("stream.features_unavailable", error=str(error), num_events=len(events))
                self._beat(error)
                self._report_lag(consumer, events)
                if stop.wait(self._pace.retry_after_s):
                    return False
        return True

    def _is_much(self, pending: Pending) -> bool:
        """Return whether enough events wait for an early checkpoint; false after the disk has refused a write."""
        return pending.num_events >= self._pace.checkpoint_every_events and not pending.is_refused

    def _keep_log(self, owned: Iterator[int]) -> None:
        """Start a step of log upkeep for the next owned partition, if any."""
        partition = next(owned, None)
        failure = self._log_upkeep.begin_step(partition) if partition is not None else None
        if failure is not None:
            self._report.log_failed(LogStep.UPKEEP, failure)

    def _erase(self, consumer: PartitionConsumer) -> None:
        """Start a round of erasure if due."""
        failure = self._eraser.begin(consumer.partitions) if self._eraser is not None else None
        if failure is not None:
            self._report.log_failed(LogStep.ERASE, failure)

    def _publish(self) -> None:
        rows = self._popularity.rows(_now_ms(), self._pace.popularity_num_items)
        changed = [row for row in rows if self._has_changed(row)]
        try:
            self._writer.write_popularity(changed)
        except DependencyUnavailable as error:
            _log.warning("stream.popularity_not_written", error=str(error))
        else:
            self._published |= {row.partition: row for row in changed}

    def _has_changed(self, row: PopularRow) -> bool:
        """Return whether a row differs from the last written row, or that row is old."""
        before = self._published.get(row.partition)
        if before is None or before.windows != row.windows:
            return True
        return abs(row.as_of_ms - before.as_of_ms) >= 1_000 * self._pace.popularity_at_least_every_s

    def _look_at_broker(self, consumer: PartitionConsumer) -> None:
        consumer.check_topic()
        self._report_lag(consumer)

    def _report_lag(self, consumer: PartitionConsumer, unapplied: Sequence[LoggedInteraction] = ()) -> None:
        self._report.lag(consumer.lag(), unapplied)
        self._report.unreadable(len(self._log.unreadable))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
