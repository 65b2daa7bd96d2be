"""Raw interactions on disk, for replay, training and the popularity windows.

    <root>/interactions/partition=<P>/<topic id>/<first offset>-<last offset>.parquet

A file appears whole or not at all (scratch file, fsync, rename, fsync of the folder). Appended files of one partition and
topic never overlap, since the writer leaves out what is logged already; so a replay after a crash changes nothing, and the
appended file of a given range always has the same bytes. Compaction merges neighbours into one file, which appears in the same
way. Its parts stay for an hour, for readers that have listed them; from the rename on, readers skip them, as they do any file
that is within another. A crash at any point leaves one of these states. Readers also drop repeated positions, in case two
writers ever ran at once.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from models.files import rename_durably
from services.contracts.events import Interaction
from services.features.schema import LogPosition
from services.stream.decode import LoggedInteraction
from services.stream.log_files import Span, choose_merge, current, span_of

KEEP_PARTS_S = 3_600.0
"""How long merged files stay for readers that have listed them."""
MAX_REMOVED = 256
"""Files that one call of `compact` removes at most."""

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
        """Return the offset of the last event that is on disk; None when there is none."""
        key = (topic_id, partition)
        if key not in self._last:
            self._last[key] = max((span.last for span in _spans(self._folder(topic_id, partition))), default=None)
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
        span = Span(new[0].position.offset, new[-1].position.offset)
        _write_atomically(self._folder(topic_id, partition) / span.name, _table(new))
        self._last[topic_id, partition] = span.last

    def compact(self, partition: int, now_s: float) -> int:
        """Merge some neighbouring small files of a partition, and remove what was merged an hour ago. A bounded step.

        Returns the number of files merged; 0 when no merge is worthwhile. `now_s` is Unix time.
        """
        for folder in self._folders(partition):
            spans = _spans(folder)
            kept = current(spans)
            _remove_parts(folder, set(spans) - set(kept), kept, now_s)
            if parts := choose_merge(kept):
                _merge(folder, parts)
                return len(parts)
        return 0

    def read(self, partition: int, not_before_ms: int = 0) -> Iterator[LoggedInteraction]:
        """Yield a partition's events, each once: topics in the order in which they were created, offsets rising.

        Files that were last written before `not_before_ms` (Unix ms) are left out.
        """
        for folder in self._folders(partition):
            last = -1
            for span in current(_spans(folder)):
                path = folder / span.name
                if path.stat().st_mtime * 1_000 < not_before_ms:
                    continue
                for event in _events(path):
                    if event.position.offset > last:
                        last = event.position.offset
                        yield event

    def _folder(self, topic_id: str, partition: int) -> Path:
        return self._root / f"partition={partition}" / topic_id

    def _folders(self, partition: int) -> list[Path]:
        """Return the folders of the topic ids, in the order in which they were created."""
        return sorted(self._root.glob(f"partition={partition}/*"), key=_created)


def _spans(folder: Path) -> list[Span]:
    return sorted(span for path in folder.glob("*-*.parquet") if (span := span_of(path)))


def _created(folder: Path) -> tuple[float, str]:
    spans = current(_spans(folder))
    return ((folder / spans[0].name).stat().st_mtime if spans else 0.0, folder.name)


def _merge(folder: Path, parts: Sequence[Span]) -> None:
    """Write neighbours as one file that is as old as the newest of them; the parts stay."""
    paths = [folder / part.name for part in parts]
    merged = folder / Span(parts[0].first, parts[-1].last).name
    table = pa.concat_tables([pq.ParquetFile(path).read() for path in paths])
    _write_atomically(merged, table, written_s=max(path.stat().st_mtime for path in paths))


def _remove_parts(folder: Path, parts: set[Span], kept: Sequence[Span], now_s: float) -> None:
    """Remove files that lie within another one which has been there for an hour, and scratch files of a crash."""
    settled = [span for span in kept if (folder / span.name).stat().st_ctime < now_s - KEEP_PARTS_S] if parts else []
    old = [
        part
        for part in sorted(parts)
        if any(whole.first <= part.first and part.last <= whole.last for whole in settled)
    ]
    for part in old[:MAX_REMOVED]:
        (folder / part.name).unlink(missing_ok=True)
    for scratch in folder.glob("*.tmp"):
        if scratch.stat().st_mtime < now_s - KEEP_PARTS_S:
            scratch.unlink(missing_ok=True)


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


def _write_atomically(path: Path, table: pa.Table, written_s: float | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        pq.write_table(table, scratch, compression="zstd")
        if written_s is not None:
            os.utime(scratch, (written_s, written_s))
        rename_durably(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)  # each restart on a full disk would leave one more
