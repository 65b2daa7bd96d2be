"""The flow of impressions, top to bottom: claim, rebuild, poll, remember by user, and periodically log and commit.

Like the worker of interactions, with its own partitions, positions and log: each impression is logged once, and counts
once in its user's row. Impressions before their user's erasure are excluded from both. A store that was lost is filled
from the log's last day.
"""

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import cycle

import structlog

from services.errors import ConfigError, DependencyUnavailable, InvalidRequest, OwnershipLost, RowChanged
from services.features.ownership import Claim, PartitionWrite
from services.features.schema import LogPosition, UserShown
from services.features.shown import ShownWriter
from services.observability.metrics import StreamMetrics
from services.stream.background import DEFAULT_PACE, LogUpkeep, Pace, Timer
from services.stream.continuity import Continuity, saved
from services.stream.decode import DeadLetter, LoggedImpression, Record, read_impression
from services.stream.impressions.memory import remember
from services.stream.log.offline_log import OfflineLog
from services.stream.partition_consumer import PartitionConsumer

IMPRESSIONS_GROUP = "tailrace-impressions"
"""The consumer group of the committed offsets."""
_POLL_MS = 200
_MAX_TRIES = 10
_BATCH_EVENTS = 1_000
_REMEMBERED_MS = 86_400_000
_GATHER_S = 0.5
"""Pause after a fetch with impressions: a fetch takes as much processor time as ten impressions."""
_log = structlog.get_logger()


class ImpressionWorker:
    """Applies the impressions of the owned partitions. Runs in one thread."""

    def __init__(
        self,
        open_consumer: Callable[[], PartitionConsumer],
        writer: ShownWriter,
        log: OfflineLog[LoggedImpression],
        metrics: StreamMetrics,
        pace: Pace = DEFAULT_PACE,
        keep_days: int = 0,
    ) -> None:
        """Keep the parts without connecting. `keep_days` is the log's retention; 0 keeps it for ever."""
        self._open_consumer = open_consumer
        self._writer = writer
        self._log = log
        self._metrics = metrics
        self._pace = pace
        self._continuity = Continuity(log, writer.partitions, metrics, self._renew_if_due)
        self._renewal = Timer(pace.renew_every_s)
        self._background = ThreadPoolExecutor(1, "impressions")
        self._upkeep = LogUpkeep(log, self._background, keep_days)
        self._missing: tuple[int, ...] = ()

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set, also while broker or store are unavailable; then checkpoint and return."""
        while not stop.is_set():
            try:
                with closing(self._open_consumer()) as consumer:
                    self._work(consumer, stop)
            except ConfigError as error:  # the topic has another number of partitions: interactions continue
                _log.error("impressions.not_consumed", error=str(error))
                stop.wait()
            except (DependencyUnavailable, OSError) as error:
                _log.warning("impressions.interrupted", error=repr(error))
                stop.wait(self._pace.retry_after_s)
            except (OwnershipLost, RowChanged) as error:
                _log.warning("impressions.write_refused", error=str(error))
            except Exception:  # noqa: BLE001 - whatever ails impressions, interactions go on
                _log.exception("impressions.failed")
                stop.wait(self._pace.retry_after_s)
        self._background.shutdown()
        self._writer.close()

    def _work(self, consumer: PartitionConsumer, stop: threading.Event) -> None:
        claims = self._claim(consumer, stop)
        self._log.forget()
        for partition, claim in claims.items():
            self._make_whole(partition, claim.position)
        consumer.assign(tuple(claims), partial(self._continuity.start, consumer, claims))
        pending: list[LoggedImpression] = []
        last: dict[int, Record] = {}
        owned = cycle(consumer.partitions)
        checkpoint = Timer(self._pace.checkpoint_impressions_every_s)
        compact = Timer(self._pace.compact_every_s)
        while not stop.is_set() and not self._renew_if_due():
            records = consumer.poll(_POLL_MS) if len(pending) < self._pace.max_pending_events else []
            impressions = self._decode(consumer, records)
            self._apply(impressions)
            pending += impressions
            last |= {record.position.partition: record for record in records}
            if checkpoint.due():
                self._checkpoint(consumer, pending, last)
            if compact.due():
                self._keep_log(next(owned, None))
            if records:
                stop.wait(_GATHER_S)
        self._checkpoint(consumer, pending, last)

    def _claim(self, consumer: PartitionConsumer, stop: threading.Event) -> dict[int, Claim]:
        """Own the wanted partitions that no other process owns; wait for the first."""
        while not stop.is_set():
            claimed = {number: self._writer.partitions.claim(number) for number in consumer.wanted}
            claims = {number: claim for number, claim in claimed.items() if claim is not None}
            self._missing = tuple(number for number in consumer.wanted if number not in claims)
            if claims:
                return claims
            stop.wait(self._pace.retry_after_s)
            consumer.check_topic()
        return {}

    def _make_whole(self, partition: int, position: LogPosition | None) -> None:
        """Apply the log's last day after the store's position."""
        topic_ids = self._log.topic_ids(partition)
        if not topic_ids or (position is not None and position.topic_id not in topic_ids):
            return
        logged = self._log.read(partition, _now_ms() - _REMEMBERED_MS, after=position)
        while batch := list(itertools.islice(logged, _BATCH_EVENTS)):
            self._renew_if_due()
            self._apply(batch)

    def _renew_if_due(self) -> bool:
        """Renew due leases; return whether a missing partition was claimed. Raises OwnershipLost."""
        if not self._renewal.due():
            return False
        partitions = self._writer.partitions
        with suppress(DependencyUnavailable):  # while the store is unavailable no other process can take a partition
            partitions.write_all([PartitionWrite(partition) for partition in partitions.owned])
            return any(partitions.claim(number) is not None for number in self._missing)
        return False

    def _decode(self, consumer: PartitionConsumer, records: Sequence[Record]) -> list[LoggedImpression]:
        """Return the readable impressions that no erasure covers; unreadable records become dead letters."""
        impressions: list[LoggedImpression] = []
        dead: list[DeadLetter] = []
        for record in records:
            if record.undecodable is not None:
                dead.append(
                    DeadLetter(record, record.undecodable.reason(record.position.partition, record.position.offset))
                )
                continue
            try:
                logged = read_impression(record, _now_ms())
            except InvalidRequest as error:
                dead.append(DeadLetter(record, str(error)[:500]))
                continue
            if logged.impression.failure is not None:  # a failed request showed no item
                continue
            erased = self._log.ledger.erased(record.position.partition)
            if not erased.covers_time(logged.impression.user_id, logged.impression.shown_time_ms):
                impressions.append(logged)
        if dead:
            consumer.dead_letter(dead)
            self._metrics.dead_lettered.inc(len(dead))
        return impressions

    def _apply(self, impressions: Sequence[LoggedImpression]) -> None:
        """Write the users' rows.

        Raises OwnershipLost or DependencyUnavailable; RowChanged when rows change again and again.
        """
        if not impressions:
            return None
        for _ in range(_MAX_TRIES - 1):
            with suppress(RowChanged):  # a user has acted on an item meanwhile
                return self._write(impressions)
        return self._write(impressions)

    def _write(self, impressions: Sequence[LoggedImpression]) -> None:
        by_user: dict[str, list[LoggedImpression]] = defaultdict(list)
        for logged in impressions:
            if logged.impression.user_id is not None:
                by_user[logged.impression.user_id].append(logged)
        before = self._writer.read(list(by_user))
        changed: dict[int, list[UserShown]] = defaultdict(list)
        for user_id, own in by_user.items():
            row = remember(before.get(user_id), own)
            if row is not None and row is not before.get(user_id):
                changed[own[0].position.partition].append(row)
        last = {logged.position.partition: logged.position for logged in impressions}
        self._writer.apply({at: changed[partition] for partition, at in last.items()}, before)

    def _checkpoint(
        self, consumer: PartitionConsumer, pending: list[LoggedImpression], last: dict[int, Record]
    ) -> None:
        """Write applied impressions to the log, then commit.

        Raises OSError if the log cannot be written: they are read again.
        """
        by_partition: dict[int, list[LoggedImpression]] = defaultdict(list)
        for logged in pending:
            by_partition[logged.position.partition].append(logged)
        for impressions in by_partition.values():
            self._log.append(impressions)
        positions = {partition: record.last_position for partition, record in last.items()}
        self._writer.partitions.write_all(
            [
                PartitionWrite(number, position=at, state={"saved": saved(at)}, leader_epoch=last[number].leader_epoch)
                for number, at in positions.items()
            ]
        )
        consumer.commit(positions)
        self._metrics.impressions_landed.inc(len(pending))
        pending.clear()
        last.clear()

    def _keep_log(self, partition: int | None) -> None:
        if partition is not None and (failure := self._upkeep.begin_step(partition)) is not None:
            _log.error("impressions.log_failed", error=repr(failure))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
