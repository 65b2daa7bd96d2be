"""Writes features in batches, and reads back the rows that are about to change. For the stream worker and the pipeline.

The store drops a row whose event timestamp is older than or equal to the one it has, and that check is not atomic: give
rows of one entity from one writer at a time, with rising times. Nothing is retried here: DependencyAway goes to the caller,
and a repeated write is harmless.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.features.redis_calls import redis_as_dependency
from services.features.repo import RepoAddress, open_store
from services.features.rows import WINDOW_MS, LogPosition, PopularRow, PrecomputedRow, UserHistory

_HISTORY_COLUMNS = (
    "item_ids",
    "newest_event_time_ms",
    "num_events",
    "row_time_us",
    "recent_event_ids",
    "topic_id",
    "partition",
    "offset",
)


class FeatureWriter:
    """The feature store as those see it who fill it. Used from one thread."""

    def __init__(self, address: RepoAddress) -> None:
        """Open the store; no connection is made yet. Raises EnvironmentFault when no features were applied."""
        self._store = open_store(address)

    def read_histories(self, user_ids: Sequence[str]) -> dict[str, UserHistory]:
        """Read these users' rows in one exchange; users without a row are absent. Raises DependencyAway."""
        if not user_ids:
            return {}
        features = [f"user_history:{column}" for column in _HISTORY_COLUMNS]
        with redis_as_dependency():
            columns = self._store.get_online_features(features, {"user_id": list(user_ids)}).to_dict()
        rows = [{name: values[index] for name, values in columns.items()} for index in range(len(user_ids))]
        return {row["user_id"]: history_from(row) for row in rows if row["num_events"] is not None}

    def write_histories(self, rows: Sequence[UserHistory]) -> None:
        """Write these rows, one per user, in one exchange. Raises DependencyAway; then some may have been written."""
        self.write_view("user_history", history_columns(rows))

    def write_popularity(self, rows: Sequence[PopularRow]) -> None:
        """Write partitions' popularity windows. Raises DependencyAway."""
        columns: dict[str, list[Any]] = {
            "partition_id": [str(row.partition) for row in rows],
            "as_of_ms": [row.as_of_ms for row in rows],
            "event_timestamp": [row.as_of_ms * 1_000 for row in rows],
        }
        for name in WINDOW_MS:
            columns[f"item_ids_{name}"] = [list(row.windows[name].item_ids) for row in rows]
            columns[f"counts_{name}"] = [list(row.windows[name].counts) for row in rows]
        self.write_view("popularity", columns)

    def write_precomputed(self, rows: Sequence[PrecomputedRow], made_at_us: int) -> None:
        """Store lists, one per user, made at this time (Unix µs): later ones replace earlier ones. Raises DependencyAway."""
        columns: dict[str, list[Any]] = {
            "user_id": [row.user_id for row in rows],
            "recommended_item_ids": [list(row.item_ids) for row in rows],
            "scores": [list(row.scores) for row in rows],
            "bundle_version": [row.bundle_version for row in rows],
            "watermark_ms": [row.watermark_ms for row in rows],
            "event_timestamp": [made_at_us] * len(rows),
        }
        self.write_view("user_recommendations", columns)

    def write_view(self, view: str, columns: dict[str, list[Any]]) -> None:
        """Write rows of a view; `event_timestamp` in Unix µs. Raises DependencyAway.

        Feast's `push` does the same after it has read all views from its registry anew, which takes twice as long as writing.
        """
        import pandas as pd

        frame = pd.DataFrame(columns)
        if frame.empty:
            return
        frame["event_timestamp"] = pd.to_datetime(frame["event_timestamp"], unit="us", utc=True)
        with redis_as_dependency():
            self._store.write_to_online_store(view, frame)


def history_columns(rows: Sequence[UserHistory]) -> dict[str, list[Any]]:
    """Lay rows out by column as the view user_history has them, online and offline; `event_timestamp` in Unix µs."""
    return {
        "user_id": [row.user_id for row in rows],
        "item_ids": [list(row.item_ids) for row in rows],
        "newest_event_time_ms": [row.newest_event_time_ms for row in rows],
        "num_events": [row.num_events for row in rows],
        "row_time_us": [row.row_time_us for row in rows],
        "recent_event_ids": [list(row.recent_event_ids) for row in rows],
        "topic_id": [row.position.topic_id for row in rows],
        "partition": [row.position.partition for row in rows],
        "offset": [row.position.offset for row in rows],
        "event_timestamp": [row.row_time_us for row in rows],
    }


def history_from(row: Mapping[str, Any]) -> UserHistory:
    """Read a row of the view user_history, as the online store or an offline table gives it."""
    return UserHistory(
        user_id=row["user_id"],
        item_ids=tuple(row["item_ids"]),
        newest_event_time_ms=row["newest_event_time_ms"],
        num_events=row["num_events"],
        row_time_us=row["row_time_us"],
        recent_event_ids=tuple(row["recent_event_ids"] or ()),
        position=LogPosition(row["topic_id"], row["partition"], row["offset"]),
    )
