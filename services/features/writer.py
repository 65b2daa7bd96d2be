"""Writes features in batches, and reads back the rows before they change. For the stream worker and the pipeline.

A history is written only if the store still has it at the position at which it was read; rows of a partition only by
the process that owns it. Lost connections are not retried here: DependencyUnavailable goes to the caller, and a
repeated write is harmless.
"""

import socket
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from services.errors import RowChanged
from services.features.layout import RowLayout, entities_of, key_prefix
from services.features.ownership import Partitions, PartitionWrite, RowWrite, mark_base, write_unowned
from services.features.redis_calls import redis_as_dependency
from services.features.repo import RepoAddress, open_store, project_of
from services.features.schema import (
    BASE_TOPIC,
    BUNDLE_VERSION,
    POPULARITY,
    USER_HISTORY,
    USER_ID,
    USER_RECOMMENDATIONS,
    USER_SHOWN,
    LogPosition,
    PopularRow,
    PrecomputedRow,
    UserHistory,
    UserShown,
    ViewSchema,
)
from services.features.shown import SHOWN_LISTS, ShownChange

_KEYS_PER_SCAN = 1_000
_POSITION = ("topic_id", "partition", "offset")
_UNKNOWN: Mapping[LogPosition, int | None] = MappingProxyType({})
_UNSHOWN: Mapping[str, ShownChange] = MappingProxyType({})
_NOBODY: Mapping[LogPosition, Collection[str]] = MappingProxyType({})


class FeatureWriter:
    """Writes the feature store. Used from one thread."""

    def __init__(self, address: RepoAddress, owner: str = "") -> None:
        """Open the store without connecting. `owner` names this process for display.

        Raises EnvironmentFault when no features were applied.
        """
        from services.settings.redis_clients import open_redis

        self._address, self._project = address, project_of(address)
        self._client = open_redis(address.redis, address.socket_timeout_s)
        self._histories = RowLayout(USER_HISTORY, self._project)
        self._shown = RowLayout(USER_SHOWN, self._project)
        self._popularity = RowLayout(POPULARITY, self._project)
        self.partitions = Partitions(self._client, uuid.uuid4().hex, owner or socket.gethostname())

    def read_histories(self, user_ids: Sequence[str]) -> dict[str, UserHistory]:
        """Read these users' rows in one exchange; users without a row are absent. Raises DependencyUnavailable."""
        return self.read_rows(user_ids, ())[0]

    def read_rows(
        self, user_ids: Sequence[str], shown_to: Sequence[str]
    ) -> tuple[dict[str, UserHistory], dict[str, UserShown]]:
        """Read these users' histories, and the impressions of `shown_to` among them; missing rows are absent.

        Raises DependencyUnavailable.
        """
        if not user_ids:
            return {}, {}
        history, shown, readers = self._histories.fields, self._shown.fields, set(shown_to)
        with redis_as_dependency():
            pipe = self._client.pipeline(transaction=False)
            for user_id in user_ids:  # both rows are in one hash
                pipe.hmget(self._histories.key(user_id), [*history, *shown] if user_id in readers else history)
            cells = pipe.execute()
        shown_cells = {user_id: own[len(history) :] for user_id, own in zip(user_ids, cells, strict=True)}
        return (
            self._histories.rows(user_ids, [own[: len(history)] for own in cells]),
            self._shown.rows(shown_to, [shown_cells[user_id] for user_id in shown_to]),
        )

    def apply_histories(
        self,
        changed: Mapping[LogPosition, Sequence[UserHistory]],
        before: Mapping[str, UserHistory],
        leader_epochs: Mapping[LogPosition, int | None] = _UNKNOWN,
        erased: Mapping[LogPosition, Collection[str]] = _NOBODY,
        acted_on: Mapping[str, ShownChange] = _UNSHOWN,
    ) -> None:
        """Replace owned partitions' rows read before, and record the log position that each partition's rows now hold.

        `leader_epochs` belong to the records there, if known. Of `erased` users only these rows remain. `acted_on` are
        users' impressions as read, and without the items that they act on now. Raises OwnershipLost, RowChanged or
        DependencyUnavailable.
        """
        self.partitions.write_all(
            [
                PartitionWrite(
                    at.partition,
                    self._history_writes(rows, before, erased.get(at, ()), acted_on),
                    position=at,
                    leader_epoch=leader_epochs.get(at),
                )
                for at, rows in changed.items()
            ]
        )

    def write_histories(self, rows: Sequence[UserHistory]) -> None:
        """Write rows that no events change concurrently, one per user; a row of the same or a later time stays.

        Raises RowChanged (some were written; repeat it) or DependencyUnavailable.
        """
        before = self.read_histories([row.user_id for row in rows])
        later = [row for row in rows if row.user_id not in before or before[row.user_id].row_time_us < row.row_time_us]
        write_unowned(self._client, [self._history_write(row, before.get(row.user_id)) for row in later])

    def write_base(self, rows: Sequence[UserHistory]) -> None:
        """Write rows of the base tables, except for users with an event, whose rows already include a base row.

        Read and write are repeated if an event of these users arrives in between. Raises DependencyUnavailable.
        """
        while True:
            before = self.read_histories([row.user_id for row in rows])
            live = {user_id for user_id, row in before.items() if row.position.topic_id != BASE_TOPIC}
            with suppress(RowChanged):
                return self.write_histories([row for row in rows if row.user_id not in live])

    def mark_base(self, base_id: str) -> None:
        """Record that the store has all rows of these base tables. Raises DependencyUnavailable."""
        mark_base(self._client, base_id)

    def write_popularity(self, rows: Sequence[PopularRow]) -> None:
        """Write owned partitions' popularity windows. Raises OwnershipLost or DependencyUnavailable."""
        self.partitions.write_all([PartitionWrite(row.partition, [self._popularity_write(row)]) for row in rows])

    def write_precomputed(self, rows: Sequence[PrecomputedRow], made_at_us: int) -> None:
        """Store lists made at this time (Unix µs): a later list of a user and bundle replaces the earlier.

        Raises DependencyUnavailable.
        """
        self._write(USER_RECOMMENDATIONS, rows, [made_at_us] * len(rows))

    def remove_precomputed(self, kept_versions: Collection[str]) -> int:
        """Remove the lists of all other bundles, and return their number. Raises DependencyUnavailable."""
        prefix = key_prefix(USER_ID.name, BUNDLE_VERSION.name)
        num_removed = 0
        with redis_as_dependency():
            for key in self._client.scan_iter(match=prefix + b"*", count=_KEYS_PER_SCAN):
                if entities_of(key, self._project)[BUNDLE_VERSION.name] not in kept_versions:
                    num_removed += self._client.unlink(key)
        return num_removed

    def close(self) -> None:
        """Release the owned partitions, and close the connections."""
        self.partitions.release()
        self._client.close()

    def _history_writes(
        self,
        rows: Sequence[UserHistory],
        before: Mapping[str, UserHistory],
        erased: Collection[str],
        acted_on: Mapping[str, ShownChange],
    ) -> list[RowWrite]:
        """Return the writes of rows, and the removals of erased users without a row."""
        writes = [
            self._with_shown(self._history_write(row, before.get(row.user_id)), acted_on.get(row.user_id))
            for row in rows
        ]
        writes = [replace(write, is_replaced=row.user_id in erased) for write, row in zip(writes, rows, strict=True)]
        without_row = set(erased) - {row.user_id for row in rows}
        return [*writes, *(self._erasing_write(user_id, before.get(user_id)) for user_id in without_row)]

    def _history_write(self, row: UserHistory, before: UserHistory | None) -> RowWrite:
        """Return the write of a row, conditional on `before` in the store; None: on an absent row."""
        cells = self._histories.cells(row, row.row_time_us)
        return RowWrite(self._histories.key(row.user_id), cells, expected=self._expected(before))

    def _with_shown(self, write: RowWrite, change: ShownChange | None) -> RowWrite:
        """Return the write of a history, and of its impressions, conditional on the impressions as read."""
        if change is None:
            return write
        read, left = change
        return replace(
            write,
            cells={**write.cells, **self._shown.some(left, SHOWN_LISTS)},
            expected={**write.expected, **self._shown.some(read, SHOWN_LISTS)},
        )

    def _erasing_write(self, user_id: str, before: UserHistory | None) -> RowWrite:
        """Return the removal of a user's row, conditional on `before` in the store."""
        return RowWrite(self._histories.key(user_id), {}, expected=self._expected(before), is_replaced=True)

    def _expected(self, before: UserHistory | None) -> dict[bytes, bytes]:
        """Return the cells that identify the version of a row that was read."""
        if before is None:
            return dict.fromkeys(self._histories.fields_of(_POSITION), b"")
        return self._histories.some(before, _POSITION)

    def _popularity_write(self, row: PopularRow) -> RowWrite:
        cells = self._popularity.cells(row, row.as_of_ms * 1_000)
        return RowWrite(self._popularity.key(str(row.partition)), cells, expected={})

    def _write(self, view: ViewSchema[Any], rows: Sequence[Any], times_us: list[int]) -> None:
        """Write rows of a view, each with its event timestamp (Unix µs). Raises DependencyUnavailable.

        Feast's `push` does the same after reading all views from its registry again, which takes twice as long as
        writing.
        """
        import pandas as pd

        if not rows:
            return
        frame = pd.DataFrame(
            {**view.to_columns(rows), "event_timestamp": pd.to_datetime(times_us, unit="us", utc=True)}
        )
        with redis_as_dependency():
            open_store(self._address).write_to_online_store(view.name, frame)
