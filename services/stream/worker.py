"""The event flow, top to bottom: poll, decode, read rows, aggregate, write rows, and now and then log and commit.

At-least-once delivery, effect exactly once: rows are written before offsets are committed, and a row knows the last offset
that it has seen, so what is delivered again is skipped. The raw events wait in memory for the offline log, and offsets are
committed only after they are on disk; a crash in between costs a replay of seconds. When Redis is away the batch at hand is
tried again until it is back; when the broker is away the session is opened anew, and what was not committed comes again.
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
from services.features.rows import WINDOW_MS, PopularRow
from services.features.writer import FeatureWriter
from services.observability.metrics import StreamMetrics
from services.observability.tracing import Attributes, Tracing, span
from services.stream.aggregate import Limits, Outcome, apply
from services.stream.decode import DeadLetter, LoggedInteraction, Record, decode
from services.stream.offline_log import OfflineLog
from services.stream.partition_consumer import PartitionConsumer
from services.stream.pending import Pending
from services.stream.popularity import Popularity
from services.stream.timer import Timer

_POLL_MS = 100
_EVENTS_PER_BEAT = 10_000
_log = structlog.get_logger()


def _pass() -> None:
    """Do nothing: the default at the points where tests interrupt a worker."""


@dataclass(frozen=True, slots=True)
class Interruptions:
    """What is called at the three points where a crash must do no harm. Tests inject a crash here."""

    after_read: Callable[[], None] = _pass
    after_write: Callable[[], None] = _pass
    before_commit: Callable[[], None] = _pass


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things happen that are not done for each batch."""

    checkpoint_every_s: float = 1.0
    checkpoint_every_events: int = 10_000
    popularity_every_s: float = 1.0
    popularity_at_least_every_s: float = 10.0
    """Written again so often though nothing changed, for a store that lost it."""
    popularity_num_items: int = 200
    lag_every_s: float = 1.0
    compact_every_s: float = 5.0
    """One partition's files are looked at each time, in turn."""
    retry_after_s: float = 0.5

    @property
    def timers_s(self) -> tuple[float, float, float, float]:
        """The periods of checkpoint, popularity, lag and compaction."""
        return self.checkpoint_every_s, self.popularity_every_s, self.lag_every_s, self.compact_every_s


class StreamWorker:
    """Applies one share of the partitions to the feature store. Runs in one thread."""

    def __init__(
        self,
        open_session: Callable[[], PartitionConsumer],
        writer: FeatureWriter,
        log: OfflineLog,
        limits: Limits,
        metrics: StreamMetrics,
        pace: Pace = Pace(),
        interruptions: Interruptions = Interruptions(),
        beat: Callable[[], None] = _pass,
        tracing: Tracing | None = None,
    ) -> None:
        """Take the parts; nothing is connected yet. `beat` is called at every turn, in good times and bad."""
        self._open_session = open_session
        self._writer = writer
        self._log = log
        self._limits = limits
        self._metrics = metrics
        self._pace = pace
        self._at = interruptions
        self._beat = beat
        self._tracing = tracing or Tracing()
        self._popularity: dict[int, Popularity] = {}
        self._published: dict[int, PopularRow] = {}

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, through the absence of broker or store; then checkpoint and return."""
        while not stop.is_set():
            try:
                with closing(self._open_session()) as session:
                    self._work(session, stop)
            except DependencyAway as error:
                _log.warning("stream.session_lost", error=str(error))
                self._beat()
                stop.wait(self._pace.retry_after_s)

    def _work(self, session: PartitionConsumer, stop: threading.Event) -> None:
        _log.info("stream.session_opened", topic_id=session.topic_id, partitions=session.partitions)
        pending = Pending()
        for partition in session.partitions:
            if partition not in self._popularity:  # a former session's counts hold all that it applied
                self._popularity[partition] = self._restore_popularity(partition, stop)
        turns = cycle(session.partitions)
        checkpoint, publish, look, compact = (Timer(every_s) for every_s in self._pace.timers_s)
        try:
            while not stop.is_set():
                self._beat()
                records = session.poll(_POLL_MS)
                with self._batch_span(records):
                    with span("decode"):
                        events, dead = decode(records)
                    self._dead_letter(session, dead)
                    if not self._apply_when_possible(session, events, stop):
                        break
                pending.add(records, events)
                for event in events:
                    self._popularity[event.position.partition].add(event.event)
                if checkpoint.due() or pending.num_events >= self._pace.checkpoint_every_events:
                    self._checkpoint(session, pending)
                if publish.due():
                    self._publish(session.partitions)
                if look.due():
                    session.check_topic()
                    self._report_lag(session, in_hand=())
                if compact.due() and (turn := next(turns, None)) is not None:
                    self._log.compact(turn, time.time())
        finally:
            self._save(pending)  # what was applied is logged even when the session is lost
        self._checkpoint(session, pending)

    def _batch_span(self, records: Sequence[Record]) -> AbstractContextManager[Span]:
        """Open the span of a batch, where any of its senders is traced."""
        about: Attributes = {
            "messaging.system": "kafka",
            "messaging.operation.type": "process",
            "messaging.operation.name": "process",
            "messaging.batch.message_count": len(records),
        }
        return self._tracing.joint_entry("process interactions", [one.trace for one in records if one.trace], about)

    def _dead_letter(self, session: PartitionConsumer, dead: Sequence[DeadLetter]) -> None:
        session.dead_letter(dead)
        self._metrics.dead_lettered.inc(len(dead))
        for letter in dead:
            _log.warning("stream.dead_letter", reason=letter.reason, position=str(letter.record.position))

    def _apply_when_possible(
        self, session: PartitionConsumer, events: Sequence[LoggedInteraction], stop: threading.Event
    ) -> bool:
        """Apply a batch, again and again while the store is away; False when told to stop before that was possible."""
        while events:
            try:
                self._apply(events)
                break
            except DependencyAway as error:
                _log.warning("stream.features_away", error=str(error), num_events=len(events))
                self._beat()
                self._report_lag(session, in_hand=events)
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
                user_id: apply(rows.get(user_id), [event.event for event in theirs], self._limits)
                for user_id, theirs in by_user.items()
            }
        with span("write"):
            changed = [one.row for one in outcomes.values() if one.row is not None and one.num_applied]
            self._writer.write_histories(changed)
        self._at.after_write()
        for user_id, outcome in outcomes.items():
            self._report(outcome, by_user[user_id])

    def _checkpoint(self, session: PartitionConsumer, pending: Pending) -> None:
        self._save(pending)
        self._at.before_commit()
        session.commit(pending.next_offsets)
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
        news = [row for row in rows if self._is_news(row)]
        try:
            self._writer.write_popularity(news)
        except DependencyAway as error:
            _log.warning("stream.popularity_not_written", error=str(error))
        else:
            self._published |= {row.partition: row for row in news}

    def _is_news(self, row: PopularRow) -> bool:
        """Whether a row differs from the one that was written last, or that one is old."""
        before = self._published.get(row.partition)
        if before is None or before.windows != row.windows:
            return True
        return row.as_of_ms - before.as_of_ms >= 1_000 * self._pace.popularity_at_least_every_s

    def _restore_popularity(self, partition: int, stop: threading.Event) -> Popularity:
        """Count what the offline log has of the last week; with much of it that takes minutes, and the heart beats on."""
        counts = Popularity()
        for number, event in enumerate(self._log.read(partition, not_before_ms=_now_ms() - WINDOW_MS["7d"])):
            if number % _EVENTS_PER_BEAT == 0:
                self._beat()
                if stop.is_set():
                    break
            counts.add(event.event)
        return counts

    def _report(self, outcome: Outcome, events: Sequence[LoggedInteraction]) -> None:
        self._metrics.applied.inc(outcome.num_applied)
        for reason in outcome.skipped:
            self._metrics.skipped.labels(reason).inc()
        if not outcome.skipped:
            now_ms = _now_ms()
            for event in events:
                if event.interaction.accepted_time_ms is not None:
                    waited_ms = max(0, now_ms - event.interaction.accepted_time_ms)  # the door's clock may be ahead
                    self._metrics.visible_seconds.observe(waited_ms / 1_000)

    def _report_lag(self, session: PartitionConsumer, in_hand: Sequence[LoggedInteraction]) -> None:
        """Tell how many events are not applied yet: those that were not polled, and those that wait for the store."""
        waiting = Counter(event.position.partition for event in in_hand)
        for partition, num_events in session.lag().items():
            self._metrics.lag.labels(str(partition)).set(num_events + waiting[partition])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
