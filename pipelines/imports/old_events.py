"""A table of events too old for the stream, for `tailrace pipeline --events`; an import replaces it when it ends.

FILE.parts holds the batches of an unfinished import. Each event id is kept once.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from models.files import rename_durably, scratch_of
from services.contracts.events import Interaction

_COLUMNS = ("user_id", "item_id", "event_type", "value", "event_id")


class OldEvents:
    """Adds events to a table. One import at a time."""

    def __init__(self, table: Path) -> None:
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
        ids = "\n".join(event.event_id for event in events)
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
                "event_id", keep="first", maintain_order=True
            )
            self._write(merged.sort("event_time", maintain_order=True), self._table)
        shutil.rmtree(self._parts, ignore_errors=True)
        return pl.scan_parquet(self._table).select(pl.len()).collect().item() if self._table.exists() else 0

    def _write(self, rows: pl.DataFrame, path: Path) -> None:
        scratch = scratch_of(path)
        rows.write_parquet(scratch)
        rename_durably(scratch, path)
