"""Restores the rows of owned partitions that a store lost: base tables first, then the offline log on top.

    <offline log>/base_histories.parquet   each user's row after the recorded events, as the pipeline wrote it last

The log is replayed from the store's own position, through the same `apply` as live events and under the same fence. An
interrupted rebuild continues there. Requests do not read a partition's rows before all of them are restored.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from services.features.ownership import Claim, partition_of
from services.features.schema import BASE_TOPIC, USER_HISTORY, LogPosition, UserHistory
from services.features.writer import FeatureWriter
from services.stream.decode import LoggedInteraction
from services.stream.effects import HistoryEffects
from services.stream.erasure.tables import base_id
from services.stream.log.offline_log import OfflineLog

_BATCH_EVENTS = 1_000
_BATCH_ROWS = 500
_log = structlog.get_logger()


def base_table(offline_log_dir: Path) -> Path:
    """Return the file of the base tables' rows, next to the log."""
    return offline_log_dir / "base_histories.parquet"


class Rebuild:
    """Brings a store up to date with base tables and log."""

    def __init__(
        self,
        table: Path,
        log: OfflineLog,
        writer: FeatureWriter,
        effects: HistoryEffects,
        beat: Callable[[], object],
        remove_restored: Callable[[int, LogPosition | None], None] | None = None,
    ) -> None:
        """Take the collaborators.

        `beat` is called after each batch; `remove_restored` removes users erased after a store's position.
        """
        self._table = table
        self._log = log
        self._writer = writer
        self._effects = effects
        self._beat = beat
        self._remove_restored = remove_restored

    def make_whole(self, claims: Mapping[int, Claim], num_partitions: int, stop: threading.Event) -> None:
        """Write the missing rows of these owned partitions, then mark them whole, unless stopped before.

        Raises OwnershipLost, RowChanged or DependencyUnavailable; OSError if base tables or log cannot be read.
        """
        base = base_id(self._table)
        baseless = {number for number, claim in claims.items() if base and base not in claim.base_ids}
        behind = {number for number, claim in claims.items() if self._is_behind(number, claim.position)}
        for partition in behind:
            self._writer.partitions.write(partition, whole="")
            if self._remove_restored is not None:
                self._remove_restored(partition, claims[partition].position)
        if baseless:
            _log.warning("stream.rebuilding", what="base tables", partitions=sorted(baseless))
            self._write_base(baseless, num_partitions, stop)
            if stop.is_set():
                return
        for partition in baseless:
            self._writer.partitions.write(partition, base=base)
        for partition in sorted(behind):
            _log.warning("stream.rebuilding", what="log", partition=partition, after=str(claims[partition].position))
            self._replay(partition, claims[partition].position, stop)
            if stop.is_set():
                return
        for partition in claims:
            self._writer.partitions.write(partition, whole=1)

    def _is_behind(self, partition: int, position: LogPosition | None) -> bool:
        """Return whether the log holds events after the store's position.

        A topic that the log has not seen yet is newer than the log.
        """
        topic_ids = self._log.topic_ids(partition)
        if not topic_ids or (position is not None and position.topic_id not in topic_ids):
            return False
        last = self._log.last_offset(topic_ids[-1], partition)
        return position is None or position.topic_id != topic_ids[-1] or (last is not None and last > position.offset)

    def _write_base(self, partitions: set[int], num_partitions: int, stop: threading.Event) -> None:
        erased = self._log.ledger.everybody()
        owned = (
            row
            for row in _base_rows(self._table)
            if partition_of(row.user_id, num_partitions) in partitions
            and not erased.covers_time(row.user_id, row.row_time_us // 1_000)
        )
        while not stop.is_set() and (chunk := list(itertools.islice(owned, _BATCH_ROWS))):
            self._beat()
            self._writer.write_base(chunk)

    def _replay(self, partition: int, after: LogPosition | None, stop: threading.Event) -> None:
        """Apply the log after this position.

        A row with an event of a later topic already has the earlier topics' events.
        """
        age = {topic_id: number for number, topic_id in enumerate(self._log.topic_ids(partition))} | {BASE_TOPIC: -1}

        def is_wanted(row: UserHistory | None, event: LoggedInteraction) -> bool:
            return row is None or age.get(row.position.topic_id, len(age)) <= age[event.position.topic_id]

        events = self._log.read(partition, after=after)
        while not stop.is_set() and (batch := list(itertools.islice(events, _BATCH_EVENTS))):
            self._beat()
            self._effects.apply(batch, is_wanted)


def _base_rows(table: Path) -> Iterator[UserHistory]:
    """Yield the rows.

    Raises OSError, also for an empty file: rows written without their base would never get it back.
    """
    try:
        with pq.ParquetFile(table) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                yield from USER_HISTORY.from_columns(batch.to_pydict())
    except pa.ArrowException as error:
        raise OSError(f"{table} cannot be read: {error}") from error
