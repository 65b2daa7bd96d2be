"""The kinds of offline logs: columns and rows of each kind of event. A further log is one more `LogKind`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import TypeVar

from services.contracts.events import Impression, Interaction, decode_impression, decode_interaction
from services.contracts.tenant import SEPARATOR
from services.errors import InvalidRequest
from services.features.schema import LogPosition
from services.stream.decode import LoggedImpression, LoggedInteraction
from services.stream.log.ledger import Erased, Tombstone


class _Logged(Protocol):
    """One event with its position in the log."""

    @property
    def position(self) -> LogPosition: ...


Logged = TypeVar("Logged", bound=_Logged, default=LoggedInteraction)


@dataclass(frozen=True, slots=True)
class LogKind(Generic[Logged]):
    """One kind of log.

    Attributes:
        name: The name of its folder.
        schema: Its columns, `user_id` among them.
        to_row: Converts an event to a row.
        from_row: Converts a row, which may be changed, to an event.
        is_erased: Whether an erasure of its user covers a row.
        erased_ids: Returns the id that erasures of each row's user have; null: no erasure can name it.
        time: The column with the time (Unix ms) that `is_erased` compares; empty if it compares positions.
        is_same: Whether a record's value, as the broker has it, is this event.
    """

    name: str
    schema: pa.Schema
    to_row: Callable[[Logged], dict[str, Any]]
    from_row: Callable[[dict[str, Any]], Logged]
    is_erased: Callable[[Tombstone, Mapping[str, Any]], bool]
    is_same: Callable[[bytes | None, Logged], bool]
    time: str = ""
    erased_ids: Callable[[pa.Table], pa.ChunkedArray] = lambda table: table["user_id"]

    def table(self, events: list[Logged]) -> pa.Table:
        return pa.Table.from_pylist([self.to_row(event) for event in events], schema=self.schema)

    def without_erased(self, table: pa.Table, erased: Erased, now_ms: int | None = None) -> pa.Table:
        """Return the rows that no erasure covers; the same table object if all remain.

        With `now_ms`, an erasure also covers rows with a later time: the clock was set back since.
        """
        if not erased:
            return table
        users = self.erased_ids(table)
        tombstones = {user_id: erased.of(user_id) for user_id in pc.unique(users).to_pylist() if user_id is not None}
        theirs = pa.array([user_id for user_id, tombstone in tombstones.items() if tombstone is not None], pa.string())
        places = np.flatnonzero(pc.is_in(users, value_set=theirs).to_numpy(zero_copy_only=False))
        is_kept = np.ones(table.num_rows, dtype=bool)
        rows = zip(users.take(places).to_pylist(), table.take(places).to_pylist(), strict=True)
        for index, (user_id, row) in zip(places.tolist(), rows, strict=True):
            tombstone = tombstones[user_id]
            is_late = now_ms is not None and self.time != "" and row[self.time] > now_ms
            is_kept[index] = tombstone is None or not (is_late or self.is_erased(tombstone, row))
        return table if is_kept.all() else table.filter(pa.array(is_kept))


def _place(row: Mapping[str, Any]) -> LogPosition:
    return LogPosition(row["topic_id"], row["partition"], row["offset"])


def _interaction_row(event: LoggedInteraction) -> dict[str, Any]:
    it, position = event.interaction, event.position
    return {
        "event_id": it.event_id,
        "user_id": it.user_id,
        "item_id": it.item_id,
        "event_type": it.event_type,
        "event_time_ms": it.event_time_ms,
        "value": float(it.value),
        "topic_id": position.topic_id,
        "partition": position.partition,
        "offset": position.offset,
        "accepted_time_ms": it.accepted_time_ms,
        "request_id": it.request_id,
    }


def _interaction_of(row: dict[str, Any]) -> LoggedInteraction:
    position = LogPosition(row.pop("topic_id"), row.pop("partition"), row.pop("offset"))
    return LoggedInteraction(Interaction(**row), position)


def _is_interaction(value: bytes | None, logged: LoggedInteraction) -> bool:
    try:
        interaction = decode_interaction(value)
    except InvalidRequest:
        return False
    return all(
        getattr(interaction, name) == getattr(logged.interaction, name) for name in ("event_id", "user_id", "item_id")
    )


def _is_impression(value: bytes | None, logged: LoggedImpression) -> bool:
    try:
        impression = decode_impression(value)
    except InvalidRequest:
        return False
    return (impression.request_id, impression.shown_time_ms) == (
        logged.impression.request_id,
        logged.impression.shown_time_ms,
    )


def _user_or_visitors(table: pa.Table) -> pa.ChunkedArray:
    """Return the user of each impression; of an anonymous visitor, the prefix of the ids of the model name's tenant."""
    users = table["user_id"]
    if "name" not in table.column_names:  # an older file
        return users
    tenants = pc.replace_substring_regex(table["name"], r"\.[^.]*$", SEPARATOR)
    return pc.coalesce(users, pc.if_else(pc.match_substring(tenants, SEPARATOR), tenants, None))


_LISTS = ("item_ids", "positions", "scores", "propensity")


def _impression_row(event: LoggedImpression) -> dict[str, Any]:
    position = event.position
    where = {"topic_id": position.topic_id, "partition": position.partition, "offset": position.offset}
    return {**msgspec.structs.asdict(event.impression), **where}


def _impression_of(row: dict[str, Any]) -> LoggedImpression:
    position = LogPosition(row.pop("topic_id"), row.pop("partition"), row.pop("offset"))
    lists = {name: tuple(row[name]) for name in _LISTS if row.get(name) is not None}
    return LoggedImpression(Impression(**row | lists), position)


_PLACE = [("topic_id", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())]
INTERACTIONS: LogKind[LoggedInteraction] = LogKind(
    name="interactions",
    schema=pa.schema(
        [
            ("event_id", pa.string()),
            ("user_id", pa.string()),
            ("item_id", pa.string()),
            ("event_type", pa.string()),
            ("event_time_ms", pa.int64()),
            ("value", pa.float64()),
            *_PLACE,
            ("accepted_time_ms", pa.int64()),
            ("request_id", pa.string()),  # the last column, since older files lack it
        ]
    ),
    to_row=_interaction_row,
    from_row=_interaction_of,
    is_erased=lambda tombstone, row: tombstone.covers(_place(row)),
    is_same=_is_interaction,
)
IMPRESSIONS: LogKind[LoggedImpression] = LogKind(
    name="impressions",
    schema=pa.schema(
        [
            ("request_id", pa.string()),
            ("user_id", pa.string()),
            ("shown_time_ms", pa.int64()),
            ("item_ids", pa.list_(pa.string())),
            ("tier", pa.string()),
            ("reason", pa.string()),
            ("bundle_version", pa.string()),
            ("newest_event_time_ms", pa.int64()),
            ("history_len", pa.int64()),
            ("history_digest", pa.string()),
            ("features_as_of_us", pa.int64()),
            *_PLACE,
            ("surface", pa.string()),
            ("name", pa.string()),
            ("variant", pa.string()),
            ("positions", pa.list_(pa.int64())),
            ("scores", pa.list_(pa.float64())),
            ("propensity", pa.list_(pa.float64())),
            ("elapsed_ms", pa.float64()),
            ("deadline_ms", pa.int64()),
            ("session", pa.string()),
        ]
    ),
    to_row=_impression_row,
    from_row=_impression_of,
    is_erased=lambda tombstone, row: bool(row["shown_time_ms"] <= tombstone.accepted_time_ms),
    is_same=_is_impression,
    time="shown_time_ms",
    erased_ids=_user_or_visitors,
)
"""Anonymous visitors have no user id: only the deletion of their tenant erases them."""
