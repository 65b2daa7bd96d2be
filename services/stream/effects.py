"""Applies a batch of events to their users' rows in the store: read, aggregate, write under the fence, per partition.

Live events and a rebuild's replay use the same path. Applied events wait for the next checkpoint.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.contracts.event_roles import HISTORY_ROLES, EventRoles
from services.errors import RowChanged
from services.features.schema import LogPosition, UserHistory
from services.features.shown import ShownChange, without_items
from services.features.writer import FeatureWriter
from services.observability.tracing import span
from services.stream.aggregate import AppliedEvents, HistoryLimits, apply
from services.stream.decode import LoggedErasure, LoggedInteraction, Record

Wanted = Callable[[UserHistory | None, LoggedInteraction], bool]
Outcomes = list[tuple[AppliedEvents, list[LoggedInteraction]]]
_MAX_TRIES = 10
_Logged = TypeVar("_Logged", LoggedInteraction, LoggedErasure)


def do_nothing() -> None:
    """Do nothing: the default of a hook."""


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Hooks at the three points where a crash must do no harm. Tests inject a crash here."""

    after_read: Callable[[], None] = do_nothing
    after_write: Callable[[], None] = do_nothing
    before_commit: Callable[[], None] = do_nothing


NO_INTERRUPTIONS = Interruptions()


class Pending:
    """The effects since the last checkpoint: events to write to the offline log, and offsets to commit."""

    def __init__(self) -> None:
        self.by_partition: dict[int, list[LoggedInteraction]] = defaultdict(list)
        self.erasures: dict[int, list[LoggedErasure]] = defaultdict(list)
        self.last: dict[int, Record] = {}
        """The last record of each partition."""
        self.is_refused = False
        """Whether writing the offline log failed at the last checkpoint."""

    @property
    def num_events(self) -> int:
        """The number of events to write to the offline log."""
        return sum(len(events) for events in self.by_partition.values())

    @property
    def has_effects(self) -> bool:
        return bool(self.by_partition or self.erasures)

    @property
    def positions(self) -> dict[int, LogPosition]:
        return {partition: record.last_position for partition, record in self.last.items()}

    def add(
        self, records: Sequence[Record], events: Sequence[LoggedInteraction], erasures: Sequence[LoggedErasure] = ()
    ) -> None:
        """Add an applied batch: all records advance the offsets; events go to the log, erasures to the ledger."""
        self.last |= {record.position.partition: record for record in records}
        for event in events:
            self.by_partition[event.position.partition].append(event)
        for erasure in erasures:
            self.erasures[erasure.position.partition].append(erasure)

    def copy(self) -> "Pending":
        """Return what waits now, which later batches do not change."""
        copy = Pending()
        copy.by_partition.update({partition: list(events) for partition, events in self.by_partition.items()})
        copy.erasures.update({partition: list(erasures) for partition, erasures in self.erasures.items()})
        copy.last.update(self.last)
        return copy

    def remove(self, batch: "Pending") -> None:
        """Remove an earlier copy, which was logged and committed."""
        self.by_partition = _without_first(self.by_partition, batch.by_partition)
        self.erasures = _without_first(self.erasures, batch.erasures)
        self.last = {number: record for number, record in self.last.items() if batch.last.get(number) is not record}
        self.is_refused = False


def _without_first(lists: Mapping[int, list[_Logged]], first: Mapping[int, list[_Logged]]) -> dict[int, list[_Logged]]:
    """Return the lists without the items that `first` has of them; empty lists are absent."""
    left = {number: items[len(first.get(number, ())) :] for number, items in lists.items()}
    return defaultdict(list, {number: items for number, items in left.items() if items})


class HistoryEffects:
    """Applies events to histories."""

    def __init__(self, writer: FeatureWriter, limits: HistoryLimits, roles: EventRoles, at: Interruptions) -> None:
        """Take the store's writer, which must own the partitions of all applied events."""
        self._writer = writer
        self._limits = limits
        self._roles = roles
        self._at = at

    def apply(
        self,
        events: Sequence[LoggedInteraction],
        is_wanted: Wanted | None = None,
        erasures: Sequence[LoggedErasure] = (),
    ) -> Outcomes:
        """Apply events and erasures, each in log order; return each user's outcome and events.

        Events that a user's row does not want count as applied, as do events before the user's erasure. Raises
        OwnershipLost or DependencyUnavailable; RowChanged when rows change again and again.
        """
        for _ in range(_MAX_TRIES - 1):
            try:
                return self._apply(events, is_wanted, erasures)
            except RowChanged:  # the pipeline wrote a user's base row between our read and our write
                continue
        return self._apply(events, is_wanted, erasures)

    def _apply(
        self, events: Sequence[LoggedInteraction], is_wanted: Wanted | None, erasures: Sequence[LoggedErasure]
    ) -> Outcomes:
        last_erasure = {logged.erasure.user_id: logged.position for logged in erasures}
        by_user: dict[str, list[LoggedInteraction]] = {user_id: [] for user_id in last_erasure}
        for event in events:
            by_user.setdefault(event.interaction.user_id, []).append(event)
        with span("read"):
            acted = {user_id: items for user_id, own in by_user.items() if (items := self._acted_items(own))}
            rows, shown = self._writer.read_rows(list(by_user), list(acted))
        self._at.after_read()
        with span("apply"):
            erased = {
                user_id: at
                for user_id, at in last_erasure.items()
                if user_id not in rows or not rows[user_id].position.covers(at)
            }
            outcomes = [
                (
                    self._outcome(
                        None if user_id in erased else rows.get(user_id), own, is_wanted, erased.get(user_id)
                    ),
                    own,
                )
                for user_id, own in by_user.items()
            ]
        with span("write"):
            changed: dict[int, list[UserHistory]] = defaultdict(list)
            for outcome, own in outcomes:
                if outcome.row is not None and outcome.row is not rows.get(outcome.row.user_id):
                    changed[own[0].position.partition].append(outcome.row)
            left = {user_id: without_items(row, acted[user_id]) for user_id, row in shown.items()}
            acted_on = {
                user_id: (row, left[user_id])
                for user_id, row in shown.items()
                if left[user_id] != row and user_id not in erased
            }
            self._write(changed, rows, erased, events, erasures, acted_on)
        self._at.after_write()
        return outcomes

    def _write(
        self,
        changed: Mapping[int, Sequence[UserHistory]],
        before: Mapping[str, UserHistory],
        erased: Mapping[str, LogPosition],
        events: Sequence[LoggedInteraction],
        erasures: Sequence[LoggedErasure],
        acted_on: Mapping[str, ShownChange],
    ) -> None:
        """Write rows, erasures, and each partition's last position, all in one step per partition."""
        last: dict[int, LoggedInteraction | LoggedErasure] = {event.position.partition: event for event in events}
        for logged in erasures:
            newest = last.setdefault(logged.position.partition, logged)
            if not newest.position.covers(logged.position):
                last[logged.position.partition] = logged
        erased_ids: dict[int, list[str]] = defaultdict(list)
        for user_id, at in erased.items():
            erased_ids[at.partition].append(user_id)
        self._writer.apply_histories(
            {logged.position: changed.get(partition, ()) for partition, logged in last.items()},
            before,
            {logged.position: logged.leader_epoch for logged in last.values()},
            {logged.position: erased_ids[partition] for partition, logged in last.items()},
            acted_on,
        )

    def _acted_items(self, events: Sequence[LoggedInteraction]) -> set[str]:
        """Return the items that a user acts on in these events, which are no longer among the user's impressions."""
        interactions = (event.interaction for event in events)
        return {
            interaction.item_id
            for interaction in interactions
            if self._roles.role(interaction.event_type, interaction.value) in HISTORY_ROLES
        }

    def _outcome(
        self,
        row: UserHistory | None,
        events: Sequence[LoggedInteraction],
        is_wanted: Wanted | None,
        erased_at: LogPosition | None,
    ) -> AppliedEvents:
        """Return the change of a row.

        A missing row may mean an erasure: events up to the store's position are not applied again.
        """
        wanted = [logged.event for logged in events if is_wanted is None or is_wanted(row, logged)]
        if row is None and wanted:
            past = self._writer.partitions.position(wanted[0].position.partition)
            covering = [at for at in (past, erased_at) if at is not None]
            wanted = [event for event in wanted if not any(at.covers(event.position) for at in covering)]
        return apply(row, wanted, self._limits, self._roles)
