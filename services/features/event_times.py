"""When a user's events happened, from the offline table, where this machine has it. For people who look, never for requests."""

from pathlib import Path

import pyarrow.parquet as pq


def read_event_times(table: Path, user_id: str) -> dict[int, int]:
    """Return the Unix ms of the user's nth event, by n (from 1); nothing when there is no such table. Blocks for the disk."""
    if not table.exists():
        return {}
    rows = pq.read_table(table, columns=["num_events", "newest_event_time_ms"], filters=[("user_id", "=", user_id)])
    return dict(zip(rows["num_events"].to_pylist(), rows["newest_event_time_ms"].to_pylist(), strict=True))
