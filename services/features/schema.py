"""The rows of the feature store, and one schema per feature view: columns, types, defaults, and row conversion.

Writer, reader, replay and pipelines take names and types from here; `feature_repo/features.py` repeats them for Feast,
which loads only that file, and a test compares the two. Knows neither Feast nor Redis, so the pure aggregates can use
it.

Adding a feature, for example a user's last event type:
1. `feature_repo/features.py`: a Field in the view, and its name in `recommend_v1` when requests read it.
2. Here: a field of the row (`last_event_type: str`) and a Column of the view with the default for rows that were stored
before
   it existed (`Column("last_event_type", STRING, default="")`); when requests read it, also an argument in
   `user_features`.
3. Its user: the code that computes it (`services/stream/aggregate.py`, for stream and replay alike) and the code that
reads it
   from `UserFeatures`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar

from services.contracts.features import PrecomputedList, UserFeatures

BASE_TOPIC = "batch"
"""The topic id of rows that come from the base tables; the first event of a real topic is applied on top."""
SERVICE = "recommend_v1"
"""The feature service that a request reads."""
WINDOW_MS = {"1h": 3_600_000, "24h": 24 * 3_600_000, "7d": 7 * 24 * 3_600_000}
"""The sliding windows of popularity by name."""
DIGEST_BYTES = 8


def event_digest(event_id: str) -> bytes:
    """Return the digest of an event's id in a row.

    A new id collides with one of a thousand others once in 10^16 events.
    """
    return blake2b(event_id.encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The position of an event in the log.

    `topic_id` is unique to one creation of the topic: a recreated topic starts at offset 0 again.
    """

    topic_id: str
    partition: int
    offset: int

    def covers(self, other: "LogPosition") -> bool:
        """Return whether the event at `other` was applied when this position was the last applied position."""
        same_log = self.topic_id == other.topic_id and self.partition == other.partition
        return same_log and other.offset <= self.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class UserHistory:
    """One user's row of the view user_history.

    `item_ids` run oldest to newest in order of arrival, cut to the newest. `row_time_us` (Unix µs) rises with each
    change of the row except of its position; it is the row's event timestamp, in the online store and offline.
    `num_events` counts the events of the history over the user's whole life. `disliked_item_ids` run oldest to newest,
    cut like the items, without duplicates. `recent_event_digests` are the digests of the event ids seen last, newest at
    the end, without separators.
    """

    user_id: str
    item_ids: tuple[str, ...]
    newest_event_time_ms: int
    num_events: int
    row_time_us: int
    position: LogPosition
    disliked_item_ids: tuple[str, ...] = ()
    recent_event_digests: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShown:
    """One user's row of the view user_shown: items with their counts and times, most recently shown last.

    `counts` are the impressions of each item since the user last acted on it, `times_s` the time of the last (Unix s).
    `position` is the position of the last impression, in the log of impressions.
    """

    user_id: str
    item_ids: tuple[str, ...]
    counts: tuple[int, ...]
    times_s: tuple[int, ...]
    position: LogPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputedRow:
    """One list of the view user_recommendations: items best first, with a score per item.

    `made_from_row_us` is the `row_time_us` of the history that it was made from.
    """

    user_id: str
    item_ids: tuple[str, ...]
    scores: tuple[float, ...]
    bundle_version: str
    made_from_row_us: int


@dataclass(frozen=True, slots=True)
class PopularWindow:
    """The most frequent items of one sliding window with their counts, most frequent first."""

    item_ids: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PopularRow:
    """One log partition's row of the view popularity.

    `windows` maps a window's name (a key of WINDOW_MS) to its items.
    """

    partition: int
    as_of_ms: int
    windows: dict[str, PopularWindow]


class ColumnType(StrEnum):
    """The types of columns, by Feast's names."""

    STRING = "String"
    INT64 = "Int64"
    STRINGS = "Array(String)"
    INT64S = "Array(Int64)"
    FLOAT64S = "Array(Float64)"
    BYTES = "Bytes"


STRING, INT64, BYTES = ColumnType.STRING, ColumnType.INT64, ColumnType.BYTES
STRINGS, INT64S, FLOAT64S = ColumnType.STRINGS, ColumnType.INT64S, ColumnType.FLOAT64S
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `get` takes its value from a row (default: the attribute of its name); lists default to empty."""

    name: str
    type: ColumnType
    get: Callable[[Any], Any] | None = None
    default: Any = None
    """The value of rows that were stored before the column existed."""

    def cell(self, row: Any) -> Any:
        """Return the row's value as the store takes it: tuples as lists."""
        value = getattr(row, self.name) if self.get is None else self.get(row)
        return list(value) if isinstance(value, tuple) else value

    def read(self, cell: Any) -> Any:
        """Return a stored value as rows hold it: lists as tuples."""
        if self.type.startswith("Array"):
            return tuple(cell) if cell is not None else ()
        return self.default if cell is None else cell


@dataclass(frozen=True, slots=True)
class ViewSchema(Generic[Row]):
    """One feature view.

    `keys` are its entities' columns; `build` makes a row from values by column name, including the keys.
    """

    name: str
    keys: tuple[Column, ...]
    features: tuple[Column, ...]
    build: Callable[[dict[str, Any]], Row]

    @property
    def key(self) -> Column:
        """The column of the first entity: the only column of most views' keys."""
        return self.keys[0]

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*self.keys, *self.features)

    @property
    def references(self) -> list[str]:
        return [f"{self.name}:{column.name}" for column in self.features]

    def to_columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        """Lay rows out by column, in the schema's order."""
        return {column.name: [column.cell(row) for row in rows] for column in self.columns}

    def from_columns(self, table: Mapping[str, Sequence[Any]]) -> list[Row]:
        """Return the rows of a table in order, skipping absent rows, whose features are all null.

        A table written before a feature existed lacks its column.
        """
        absent = [None] * len(table[self.key.name])
        rows = zip(*(table.get(column.name, absent) for column in self.columns), strict=True)
        return [self._row(cells) for cells in rows if any(cell is not None for cell in cells[len(self.keys) :])]

    def _row(self, cells: Sequence[Any]) -> Row:
        return self.build({column.name: column.read(cell) for column, cell in zip(self.columns, cells, strict=True)})


USER_ID = Column("user_id", STRING)
BUNDLE_VERSION = Column("bundle_version", STRING)
PARTITION_ID = Column("partition_id", STRING, lambda row: str(row.partition))


def _history(cells: dict[str, Any]) -> UserHistory:
    """Build a row. Rows written before digests existed hold event ids."""
    cells["recent_event_digests"] += b"".join(map(event_digest, cells.pop("recent_event_ids")))
    position = LogPosition(cells.pop("topic_id"), cells.pop("partition"), cells.pop("offset"))
    return UserHistory(position=position, **cells)


USER_HISTORY = ViewSchema(
    name="user_history",
    keys=(USER_ID,),
    features=(
        Column("item_ids", STRINGS),
        Column("newest_event_time_ms", INT64),
        Column("num_events", INT64),
        Column("row_time_us", INT64),
        Column("recent_event_ids", STRINGS, lambda _row: ()),
        Column("topic_id", STRING, attrgetter("position.topic_id")),
        Column("partition", INT64, attrgetter("position.partition")),
        Column("offset", INT64, attrgetter("position.offset")),
        Column("disliked_item_ids", STRINGS),
        Column("recent_event_digests", BYTES, default=b""),
    ),
    build=_history,
)


def _shown(cells: dict[str, Any]) -> UserShown:
    position = LogPosition(cells["shown_topic_id"], cells["shown_partition"], cells["shown_offset"])
    items, counts, times_s = (cells[f"shown_{name}"] for name in ("item_ids", "counts", "times_s"))
    return UserShown(user_id=cells["user_id"], item_ids=items, counts=counts, times_s=times_s, position=position)


USER_SHOWN = ViewSchema(
    name="user_shown",
    keys=(USER_ID,),
    features=(
        Column("shown_item_ids", STRINGS, attrgetter("item_ids")),
        Column("shown_counts", INT64S, attrgetter("counts")),
        Column("shown_times_s", INT64S, attrgetter("times_s")),
        Column("shown_topic_id", STRING, attrgetter("position.topic_id")),
        Column("shown_partition", INT64, attrgetter("position.partition")),
        Column("shown_offset", INT64, attrgetter("position.offset")),
    ),
    build=_shown,
)
"""In the hash of USER_HISTORY, since both have the same entity: one read returns both, and an erasure removes both."""

USER_RECOMMENDATIONS = ViewSchema(
    name="user_recommendations",
    keys=(USER_ID, BUNDLE_VERSION),
    features=(
        Column("recommended_item_ids", STRINGS, attrgetter("item_ids")),
        Column("scores", FLOAT64S),
        Column("made_from_row_us", INT64),
    ),
    build=lambda cells: PrecomputedRow(item_ids=cells.pop("recommended_item_ids"), **cells),
)


def _window_columns(name: str) -> tuple[Column, Column]:
    return (
        Column(f"item_ids_{name}", STRINGS, lambda row: row.windows[name].item_ids),
        Column(f"counts_{name}", INT64S, lambda row: row.windows[name].counts),
    )


def _popular(cells: dict[str, Any]) -> PopularRow:
    windows = {name: PopularWindow(cells[f"item_ids_{name}"], cells[f"counts_{name}"]) for name in WINDOW_MS}
    return PopularRow(partition=int(cells["partition_id"]), as_of_ms=cells["as_of_ms"], windows=windows)


POPULARITY = ViewSchema(
    name="popularity",
    keys=(PARTITION_ID,),
    features=(Column("as_of_ms", INT64), *chain.from_iterable(map(_window_columns, WINDOW_MS))),
    build=_popular,
)

VIEWS: tuple[ViewSchema[Any], ...] = (USER_HISTORY, USER_SHOWN, USER_RECOMMENDATIONS, POPULARITY)


def user_features(row: Mapping[str, Any], listed_at_s: int | None) -> UserFeatures:
    """Return one user's row of the feature service; absent features are empty.

    Args:
        row: Values by column name, null if absent.
        listed_at_s: When the precomputed list was stored, in Unix seconds.
    """
    precomputed = None
    if row["recommended_item_ids"]:
        precomputed = PrecomputedList(
            item_ids=tuple(row["recommended_item_ids"]),
            scores=tuple(row["scores"]),
            bundle_version=row["bundle_version"],
            made_from_row_us=row["made_from_row_us"],
            made_at_s=listed_at_s,
        )
    history_item_ids, disliked_item_ids = tuple(row["item_ids"] or ()), tuple(row["disliked_item_ids"] or ())
    items = row["shown_item_ids"] or ()
    shown = dict(zip(items, row["shown_counts"] or (), strict=True))
    shown_times_s = dict(zip(items, row["shown_times_s"] or (), strict=True))
    if not (history_item_ids or disliked_item_ids):
        return UserFeatures(precomputed=precomputed, shown=shown, shown_times_s=shown_times_s)
    return UserFeatures(
        history_item_ids=history_item_ids,
        disliked_item_ids=disliked_item_ids,
        newest_event_time_ms=row["newest_event_time_ms"],
        num_events=row["num_events"],
        as_of_us=row["row_time_us"],
        precomputed=precomputed,
        shown=shown,
        shown_times_s=shown_times_s,
    )
