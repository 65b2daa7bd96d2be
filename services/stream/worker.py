"""The event flow, top to bottom: poll, decode, read rows, aggregate, write rows, and periodically log and commit.

At-least-once delivery, effect exactly once: rows are written before offsets are committed, and a row holds the last applied offset, so what
is delivered again is skipped. The raw events wait in memory for the offline log, and offsets are committed only after they are on disk; a
crash in between costs a replay of seconds. While Redis is unavailable the current batch is retried; when the broker is unavailable the
consumer is opened anew, and what was not committed comes again.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import cycle

import structlog
from opentelemetry.trace import Span

from services.errors import DependencyAway
from services.features.schema import WINDOW_MS, PopularRow
from services.features.writer import FeatureWriter
from services.observability.metrics import StreamMetrics
from services.observability.tracing import Attributes, Tracing, span
from services.stream.aggregate import AppliedEvents, HistoryLimits, apply
from services.stream.decode import DeadLetter, LoggedInteraction, Record, decode
from services.stream.listed_items import ListedItems
from services.stream.offline_log import OfflineLog
from services.stream.partition_consumer import PartitionConsumer
from services.stream.popularity import PopularityCounter

_POLL_MS = 100
_EVENTS_PER_BEAT = 10_000
_log = structlog.get_logger()


def _pass() -> None:
    """Do nothing: the default at the points where tests interrupt a worker."""


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Hooks at the three points where a crash must do no harm. Tests inject a crash here."""

    after_read: Callable[[], None] = _pass
    after_write: Callable[[], None] = _pass
    before_commit: Callable[[], None] = _pass


@dataclass(frozen=True, slots=True)
class Pace:
    """The periods of what is not done for each batch."""

    checkpoint_every_s: float = 1.0
    checkpoint_every_events: int = 10_000
    popularity_every_s: float = 1.0
    popularity_at_least_every_s: float = 10.0
    """Unchanged windows are written again this often, for a store that lost them."""
    popularity_num_items: int = 200
    lag_every_s: float = 1.0
    compact_every_s: float = 5.0
    """Each time one partition's files are compacted, the next one's after that."""
    retry_after_s: float = 0.5

    @property
    def timers_s(self) -> tuple[float, float, float, float]:
        """The periods of checkpoint, popularity, lag and compaction."""
        return self.checkpoint_every_s, self.popularity_every_s, self.lag_every_s, self.compact_every_s


class Pending:
    """What was applied since the last checkpoint: events to write to the offline log, and offsets to commit."""

    def __init__(self) -> None:
        self.by_partition: dict[int, list[LoggedInteraction]] = defaultdict(list)
        self.next_offsets: dict[int, int] = {}

    @property
    def num_events(self) -> int:
        """The number of events to write to the offline log."""
        return sum(len(events) for events in self.by_partition.values())

    def add(self, records: Sequence[Record], events: Sequence[LoggedInteraction]) -> None:
        """Add an applied batch: all its records count for the offsets, its readable events for the log."""
        for record in records:
            self.next_offsets[record.position.partition] = record.position.offset + 1
        for event in events:
            self.by_partition[event.position.partition].append(event)

    def clear(self) -> None:
        """Empty it after everything was logged and committed."""
        self.by_partition.clear()
        self.next_offsets.clear()


class Timer:
    """A period on the monotonic clock: due once per `every_s`, first after one period."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock() + every_s

    def due(self) -> bool:
        """Whether the period is over; if so the next one begins now."""
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._every_s
        return True


class StreamWorker:
    """Applies the events of the owned partitions to the feature store. Runs in one thread."""

    def __init__(
        self,
        open_consumer: Callable[[], PartitionConsumer],
        writer: FeatureWriter,
        log: OfflineLog,
        items: ListedItems,
        limits: HistoryLimits,
        metrics: StreamMetrics,
        pace: Pace = Pace(),
        interruptions: Interruptions = Interruptions(),
        beat: Callable[[], None] = _pass,
        tracing: Tracing | None = None,
    ) -> None:
        """Keep the parts; nothing is connected yet.

        `items` are those whose popularity is counted. `beat`, the heartbeat, is called in every iteration, also while a dependency is
        unavailable.
        """
        self._open_consumer = open_consumer
        self._writer = writer
        self._log = log
        self._items = items
        self._limits = limits
        self._metrics = metrics
        self._pace = pace
        self._at = interruptions
        self._beat = beat
        self._tracing = tracing or Tracing()
        self._popularity: dict[int, PopularityCounter] = {}
        self._published: dict[int, PopularRow] = {}

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, also while broker or store are unavailable; then checkpoint and return."""
        while not stop.is_set():
            try:
                with closing(self._open_consumer()) as consumer:
                    self._work(consumer, stop)
            except DependencyAway as error:
                _log.warning("stream.consumer_lost", error=str(error))
                self._beat()
                stop.wait(self._pace.retry_after_s)

    def _work(self, consumer: PartitionConsumer, stop: threading.Event) -> None:
        _log.info("stream.consumer_opened", topic_id=consumer.topic_id, partitions=consumer.partitions)
        pending = Pending()
        for partition in consumer.partitions:
            if partition not in self._popularity:  # an earlier consumer's counts hold all that it applied
                self._popularity[partition] = self._restore_popularity(partition, stop)
        owned = cycle(consumer.partitions)
        checkpoint, publish, lag, compact = (Timer(every_s) for every_s in self._pace.timers_s)
        try:
            while not stop.is_set():
                self._beat()
                records = consumer.poll(_POLL_MS)
                with self._batch_span(records):
                    with span("decode"):
                        events, dead = decode(records, _now_ms())
                    self._dead_letter(consumer, dead)
                    if not self._apply_with_retries(consumer, events, stop):
                        break
                pending.add(records, events)
                for event in events:
                    self._popularity[event.position.partition].add(event.event)
                if checkpoint.due() or pending.num_events >= self._pace.checkpoint_every_events:
                    self._checkpoint(consumer, pending)
                if publish.due():
                    self._publish(consumer.partitions)
                if lag.due():
                    consumer.check_topic()
                    self._report_lag(consumer, unapplied=())
                if compact.due() and (next_partition := next(owned, None)) is not None:
                    self._log.compact(next_partition, time.time())
        finally:
            self._save(pending)  # what was applied is logged even when the consumer fails
        self._checkpoint(consumer, pending)

    def _batch_span(self, records: Sequence[Record]) -> AbstractContextManager[Span]:
        """Open the span of a batch, when any of its producers is traced."""
        attributes: Attributes = {
            "messaging.system": "kafka",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.batch.message_count": len(records),
        }
        return self._tracing.joint_entry(
            "process interactions", [one.trace for one in records if one.trace], attributes
        )

    def _dead_letter(self, consumer: PartitionConsumer, dead: Sequence[DeadLetter]) -> None:
        consumer.dead_letter(dead)
        self._metrics.dead_lettered.inc(len(dead))
        for letter in dead:
            _log.warning("stream.dead_letter", reason=letter.reason, position=str(letter.record.position))

    def _apply_with_retries(
        self, consumer: PartitionConsumer, events: Sequence[LoggedInteraction], stop: threading.Event
    ) -> bool:
        """Apply a batch, retrying while the store is unavailable; False when stopped before that succeeded."""
        while events:
            try:
                self._apply(events)
                break
            except DependencyAway as error:
                _log.warning("stream.features_unavailable", error=str(error), num_events=len(events))
                self._beat()
                self._report_lag(consumer, unapplied=events)
                if stop.wait(self._pace.retry_after_s):
                    return False
        return True

    def _apply(self, events: Sequence[LoggedInteraction]) -> None:
        by_user: dict[str, list[LoggedInteraction]] = defaultdict(list)
        for event in events:
            by_user[event.interaction.user_id].append(event)
        with span("read"):
            rows = self._writer.read_histories(list(by_user))
        self._at.after_read()
        with span("apply"):
            outcomes = {
                user_id: apply(rows.get(user_id), [event.event for event in own], self._limits)
                for user_id, own in by_user.items()
            }
        with span("write"):
            changed = [one.row for one in outcomes.values() if one.row is not None and one.num_applied]
            self._writer.write_histories(changed)
        self._at.after_write()
        for user_id, outcome in outcomes.items():
            self._report(outcome, by_user[user_id])

    def _checkpoint(self, consumer: PartitionConsumer, pending: Pending) -> None:
        self._save(pending)
        self._at.before_commit()
        consumer.commit(pending.next_offsets)
        pending.clear()

    def _save(self, pending: Pending) -> None:
        for events in pending.by_partition.values():
            self._log.append(events)

    def _publish(self, partitions: Sequence[int]) -> None:
        now_ms, num_items = _now_ms(), self._pace.popularity_num_items
        rows = [
            PopularRow(partition=one, as_of_ms=now_ms, windows=self._popularity[one].top(now_ms, num_items))
            for one in partitions
        ]
        changed = [row for row in rows if self._has_changed(row)]
        try:
            self._writer.write_popularity(changed)
        except DependencyAway as error:
            _log.warning("stream.popularity_not_written", error=str(error))
        else:
            self._published |= {row.partition: row for row in changed}

    def _has_changed(self, row: PopularRow) -> bool:
        """Whether a row differs from the one written last, or that one is old."""
        before = self._published.get(row.partition)
        if before is None or before.windows != row.windows:
            return True
        return row.as_of_ms - before.as_of_ms >= 1_000 * self._pace.popularity_at_least_every_s

    def _restore_popularity(self, partition: int, stop: threading.Event) -> PopularityCounter:
        """Count the offline log's last week. That may take minutes, so the heartbeat goes on."""
        counts = PopularityCounter(self._items)
        for number, event in enumerate(self._log.read(partition, not_before_ms=_now_ms() - WINDOW_MS["7d"])):
            if number % _EVENTS_PER_BEAT == 0:
                self._beat()
                if stop.is_set():
                    break
            counts.add(event.event)
        return counts

    def _report(self, outcome: AppliedEvents, events: Sequence[LoggedInteraction]) -> None:
        self._metrics.applied.inc(outcome.num_applied)
        for reason in outcome.skipped:
            self._metrics.skipped.labels(reason).inc()
        if not outcome.skipped:
            now_ms = _now_ms()
            for event in events:
                if event.interaction.accepted_time_ms is not None:
                    waited_ms = max(0, now_ms - event.interaction.accepted_time_ms)  # the gateway's clock may be ahead
                    self._metrics.visible_seconds.observe(waited_ms / 1_000)

    def _report_lag(self, consumer: PartitionConsumer, unapplied: Sequence[LoggedInteraction]) -> None:
        """Set the lag: the events that were not polled yet, and those that wait for the store."""
        waiting = Counter(event.position.partition for event in unapplied)
        for partition, num_events in consumer.lag().items():
            self._metrics.lag.labels(str(partition)).set(num_events + waiting[partition])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
