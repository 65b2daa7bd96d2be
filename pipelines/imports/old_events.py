"""A table of events too old for the stream, for `tailrace pipeline --events`; an import replaces it when it ends.

FILE.parts holds the batches of an unfinished import. Each event id of a user is kept once.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from models.files import rename_durably, scratch_of
from services.contracts.events import Interaction
from services.errors import ConfigError

_COLUMNS = ("user_id", "item_id", "event_type", "value", "event_id")
_TYPES = {**dict.fromkeys(_COLUMNS, pl.String()), "value": pl.Float64(), "event_time": pl.Int64()}


class OldEvents:
    """Adds events to a table. One import at a time."""

    def __init__(self, table: Path) -> None:
        """Raises ConfigError for a file that no import wrote."""
        if table.exists() and _types_of(table) != _TYPES:
            raise ConfigError(f"--table: {table} is not the table of an earlier import; give another file")
        self._table = table
        self._parts = table.with_name(f"{table.name}.parts")

    def add(self, events: Sequence[Interaction]) -> None:
        """Keep a batch; repeating a batch has no effect. Returns when the batch is on disk."""
        if not events:
            return
        self._parts.mkdir(parents=True, exist_ok=True)
        rows = [
            {name: getattr(event, name) for name in _COLUMNS} | {"event_time": event.event_time_ms} for event in events
        ]
        ids = "\n".join(f"{event.user_id}\t{event.event_id}" for event in events)
        name = hashlib.sha256(ids.encode()).hexdigest()[:16]
        parts = [*self._parts.glob("*.parquet")]
        if not any(part.stem.endswith(name) for part in parts):
            self._write(pl.DataFrame(rows), self._parts / f"{len(parts):08}-{name}.parquet")

    def finish(self) -> int:
        """Merge the batches into the table by time, ties in order of arrival; return the table's number of events."""
        files = [*sorted(self._parts.glob("*.parquet"))]
        if files:
            read = [self._table, *files] if self._table.exists() else files
            merged = pl.concat([pl.read_parquet(path) for path in read], how="diagonal").unique(
                ["user_id", "event_id"], keep="first", maintain_order=True
            )
            self._write(merged.sort("event_time", maintain_order=True), self._table)
        shutil.rmtree(self._parts, ignore_errors=True)
        return pl.scan_parquet(self._table).select(pl.len()).collect().item() if self._table.exists() else 0

    def _write(self, rows: pl.DataFrame, path: Path) -> None:
        scratch = scratch_of(path)
        rows.write_parquet(scratch)
        rename_durably(scratch, path)


def _types_of(path: Path) -> dict[str, pl.DataType] | None:
    """Return the columns' types; None for another format than Parquet."""
    try:
        return {**pl.read_parquet_schema(path)}
    except (pl.exceptions.PolarsError, OSError):
        return None
