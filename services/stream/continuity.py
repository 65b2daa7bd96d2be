"""Where to resume in a partition's log, and whether it is still the log that was read.

A log may come back shorter under the same topic id and grow again: the broker's machine lost power, an elected leader
lacked records, or a volume was restored. Its offsets then name other events, which rows and offline log would skip as
old. So three facts are compared with the log before reading: where the log ends, where the leader epoch of the last
applied record ends (KIP-320), and the last logged event with the record at its offset. A log that differs is a new log
from the first record that does not match the logged event: the topic id gets an epoch, `<topic id>+1`, then `+2`.
Positions, rows and folders of the offline log carry that id, so no record is taken for an old event.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import structlog

from services.features.ownership import Claim, Partitions
from services.features.schema import LogPosition
from services.observability.metrics import StreamMetrics
from services.settings.broker_log import BrokerLog
from services.stream.log.offline_log import OfflineLog

_log = structlog.get_logger()


def saved(position: LogPosition) -> str:
    """Return the state with the end offset of a partition's offline log."""
    return f"{position.topic_id}/{position.offset}"


def newest_epoch(topic_id: str, known_ids: Iterable[str]) -> str:
    """Return the topic id with the highest epoch among these ids; the broker's topic id if none has an epoch."""
    return max((known_id for known_id in known_ids if _split(known_id)[0] == topic_id), key=_split, default=topic_id)


def next_epoch(log_id: str) -> str:
    """Return the id of the log that follows this log under the same topic id."""
    topic_id, number = _split(log_id)
    return f"{topic_id}+{number + 1}"


def _split(log_id: str) -> tuple[str, int]:
    topic_id, plus, number = log_id.rpartition("+")
    return (topic_id, int(number)) if plus and number.isdigit() else (log_id, 0)


class BrokerTopic(Protocol):
    """The topic as the broker has it."""

    topic_id: str
    broker_log: BrokerLog


class Continuity:
    """Finds the first record to read of a partition."""

    def __init__(
        self, log: OfflineLog[Any], partitions: Partitions, metrics: StreamMetrics, beat: Callable[[], object]
    ) -> None:
        """Take the collaborators. `beat` is called before each compared record."""
        self._offline = log
        self._partitions = partitions
        self._metrics = metrics
        self._beat = beat
        self._is_reported = False

    def start(
        self, topic: BrokerTopic, claims: Mapping[int, Claim], partition: int, committed: LogPosition | None
    ) -> LogPosition:
        """Return the first record of a whole partition that may be missing from the rows or from the offline log.

        Its topic id is that of the log from there on. Raises OwnershipLost or DependencyUnavailable.
        """
        claim, position = claims[partition], self._partitions.position(partition)
        known = [saved.topic_id for saved in (position, claim.saved) if saved is not None]
        log_id = newest_epoch(topic.topic_id, [*known, *self._offline.topic_ids(partition)])

        def after(held: LogPosition | None) -> int:
            return held.offset + 1 if held is not None and held.topic_id == log_id else 0

        logged, applied = self._offline.last_offset(log_id, partition), after(position)
        logged_until, saved_until = 0 if logged is None else logged + 1, max(after(committed), after(claim.saved))
        read = max(applied, logged_until)
        epoch = claim.leader_epoch if applied == read and position == claim.position else None
        last = LogPosition(log_id, partition, read - 1)
        if read and (first := self._first_change(topic.broker_log, last, epoch, saved_until)) is not None:
            return self._begin(replace(last, topic_id=next_epoch(log_id), offset=first), read)
        return replace(last, offset=max(logged_until, min(saved_until, applied)))

    def _begin(self, first: LogPosition, read: int) -> LogPosition:
        """Record that a different log begins at this record."""
        before = replace(first, offset=first.offset - 1)
        _log.warning("stream.log_changed", partition=first.partition, first=str(first), read_until=read)
        self._metrics.changed_logs.inc()
        self._partitions.write(first.partition, position=before, saved=saved(before))
        return first

    def _first_change(
        self, broker: BrokerLog, last: LogPosition, leader_epoch: int | None, saved_until: int
    ) -> int | None:
        """Return the first offset that may differ from the read log; None if the log up to `last` is unchanged.

        `leader_epoch` belongs to the record read at `last`, if known. All records before `saved_until` are already
        logged.
        """
        if not broker.knows_epochs and not self._is_reported:
            _log.warning("stream.broker_without_leader_epochs", compared="the log's end and the last logged event")
            self._is_reported = True
        begin, read = broker.begin(last.partition), last.offset + 1
        intact = broker.intact_until(last.partition, read, leader_epoch)
        logged = self._offline.last_offset(last.topic_id, last.partition)
        event = self._logged_at(last) if logged is None else self._logged_from(replace(last, offset=logged))
        if event is not None and not begin <= event.position.offset < read:
            event = None
        if intact == read and (event is None or self._is_there(broker, event)):
            return None
        if event is None and broker.knows_epochs and leader_epoch is not None:
            return min(intact, saved_until)
        return self._search(broker, last, begin, intact)

    def _search(self, broker: BrokerLog, last: LogPosition, low: int, high: int) -> int:
        """Return the offset after the last record before `high` that matches the logged event; `low` if none matches.

        Two logs that agree in a record agree in all records before it. Records that were not logged count as changed:
        if they were applied anyway, in the last second, their event ids are recognised.
        """
        probe = high - 1
        while low < high:
            event = self._logged_at(replace(last, offset=probe))
            if event is not None and event.position.offset < high and self._is_there(broker, event):
                low = event.position.offset + 1
            else:
                high = probe
            probe = (low + high) // 2
        return low

    def _logged_at(self, position: LogPosition) -> Any:
        """Return the logged event at or after this offset, in the epoch that the broker had there before the change.

        That is the newest epoch that begins at or before the offset.
        """
        topic_id, next_event = _split(position.topic_id)[0], None
        epochs = [log_id for log_id in self._offline.topic_ids(position.partition) if _split(log_id)[0] == topic_id]
        for log_id in sorted(epochs, key=_split, reverse=True):
            oldest = self._logged_from(LogPosition(log_id, position.partition, 0))
            if oldest is None or oldest.position.offset > position.offset:
                next_event = _earlier(oldest, next_event)
            else:
                return _earlier(self._logged_from(replace(position, topic_id=log_id)), next_event)
        return next_event

    def _logged_from(self, position: LogPosition) -> Any:
        """Return the first event of this log at or after this offset in the offline log."""
        event = next(self._offline.read(position.partition, after=replace(position, offset=position.offset - 1)), None)
        return event if event is not None and event.position.topic_id == position.topic_id else None

    def _is_there(self, broker: BrokerLog, event: Any) -> bool:
        """Return whether the broker still has a logged event at its offset. An unreadable record counts as a match."""
        self._beat()
        record = broker.value_at(event.position.partition, event.position.offset)
        return record is None or (record[0] == event.position.offset and self._offline.kind.is_same(record[1], event))


def _earlier(candidate: Any, other: Any) -> Any:
    both = [event for event in (candidate, other) if event is not None]
    return min(both, key=lambda event: event.position.offset, default=None)
