"""Rows of the feature store with default values, for tests."""

from typing import Any

from services.features.ownership import KEY
from services.features.schema import LogPosition, UserHistory, event_digest


def history_row(
    user_id: str = "u", item_ids: tuple[str, ...] = ("a",), row_time_us: int = 1_000_000, *, topic_id: str = "t"
) -> UserHistory:
    """Build a user's row whose newest event is as old as the row."""
    return UserHistory(
        user_id=user_id,
        item_ids=item_ids,
        newest_event_time_ms=row_time_us // 1_000,
        num_events=len(item_ids),
        row_time_us=row_time_us,
        recent_event_digests=event_digest("e1") + event_digest("e2"),
        position=LogPosition(topic_id, 1, 7),
    )


def declare_whole(client: Any, num_partitions: int = 8) -> None:
    """Let requests read a store with unclaimed partitions."""
    client.hset(KEY, mapping={f"{partition}:whole": 1 for partition in range(num_partitions)})
