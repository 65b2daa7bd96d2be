"""Raw interactions on disk, for replay, training and the popularity windows.

    <root>/interactions/partition=<P>/<topic id>/<first offset>-<last offset>.parquet

A file appears whole or not at all (scratch file, fsync, rename, fsync of the folder). Files of one partition and topic
never overlap, since the writer leaves out what is logged already; so a replay after a crash changes nothing, and the file
of a given range has given bytes. Readers drop repeated positions all the same, in case two writers ever met.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from services.contracts.events import Interaction
from services.features.rows import LogPosition
from services.stream.decode import LoggedInteraction

SCHEMA = pa.schema(
    [
        ("event_id", pa.string()),
        ("user_id", pa.string()),
        ("item_id", pa.string()),
        ("event_type", pa.string()),
        ("event_time_ms", pa.int64()),
        ("value", pa.float64()),
        ("topic_id", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("accepted_time_ms", pa.int64()),
    ]
)


class OfflineLog:
    """The files of raw interactions below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root / "interactions"
        self._last: dict[tuple[str, int], int | None] = {}

    def last_offset(self, topic_id: str, partition: int) -> int | None:
        """Give the offset of the last event that is on disk; None when there is none."""
        key = (topic_id, partition)
        if key not in self._last:
            self._last[key] = max((_last_of(path) for path in _files(self._folder(topic_id, partition))), default=None)
        return self._last[key]

    def append(self, events: Sequence[LoggedInteraction]) -> None:
        """Write events of one partition and topic, in rising offset order, as one file; those on disk are left out."""
        if not events:
            return
        topic_id, partition = events[0].position.topic_id, events[0].position.partition
        last = self.last_offset(topic_id, partition)
        new = [event for event in events if last is None or event.position.offset > last]
        if not new:
            return
        first_offset, last_offset = new[0].position.offset, new[-1].position.offset
        path = self._folder(topic_id, partition) / f"{first_offset:020d}-{last_offset:020d}.parquet"
        _write_whole(path, _table(new))
        self._last[topic_id, partition] = last_offset

    def read(self, partition: int, not_before_ms: int = 0) -> Iterator[LoggedInteraction]:
        """Give a partition's events, each once: topics in the order in which they were begun, offsets rising.

        Files that were last written before `not_before_ms` (Unix ms) are left out.
        """
        for folder in sorted(self._root.glob(f"partition={partition}/*"), key=_begun):
            last = -1
            for path in _files(folder):
                if path.stat().st_mtime * 1_000 < not_before_ms:
                    continue
                for event in _events(path):
                    if event.position.offset > last:
                        last = event.position.offset
                        yield event

    def _folder(self, topic_id: str, partition: int) -> Path:
        return self._root / f"partition={partition}" / topic_id


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-*.parquet"))


def _begun(folder: Path) -> tuple[float, str]:
    files = _files(folder)
    return (files[0].stat().st_mtime if files else 0.0, folder.name)


def _last_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _table(events: Sequence[LoggedInteraction]) -> pa.Table:
    rows = [
        {
            "event_id": event.interaction.event_id,
            "user_id": event.interaction.user_id,
            "item_id": event.interaction.item_id,
            "event_type": event.interaction.event_type,
            "event_time_ms": event.interaction.event_time_ms,
            "value": float(event.interaction.value),
            "topic_id": event.position.topic_id,
            "partition": event.position.partition,
            "offset": event.position.offset,
            "accepted_time_ms": event.interaction.accepted_time_ms,
        }
        for event in events
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _events(path: Path) -> Iterator[LoggedInteraction]:
    for row in pq.ParquetFile(path).read().to_pylist():
        position = LogPosition(row.pop("topic_id"), row.pop("partition"), row.pop("offset"))
        yield LoggedInteraction(Interaction(**row), position)


def _write_whole(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with scratch.open("wb") as stream:
        pq.write_table(table, stream, compression="zstd")
        stream.flush()
        os.fsync(stream.fileno())
    scratch.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
