"""Raw interactions on disk, for replay, training and the popularity windows.

    <root>/interactions/partition=<P>/<topic id>/<day>/<first offset>-<last offset>.parquet

The day is the UTC day of writing. Files are merged within their day, so a day's folder does not change after the next
day, and is removed whole when it exceeds the retention. Files without a day's folder are from an earlier version.
Topics are in the order of their files' times, so no file is dated before the files of an earlier topic, or lies in an
earlier day than its topic's newest file, even if the clock was set back.

A file appears whole or not at all (scratch file, fsync, rename, fsync of the folder). Appended files of one partition
and topic never overlap, since the writer skips logged events; so a replay after a crash changes nothing, and the
appended file of a given range always has the same bytes. Compaction merges neighbours into one file, which appears in
the same way. The merged parts stay for an hour, for readers that have listed them; after the rename, readers skip them
like any file whose span lies within another. A crash at any point leaves one of these states. Readers also drop
repeated positions, in case two writers ever ran at once.

A corrupt file (a bad block, a truncated copy) is skipped by reads and merges until it is replaced, and is not removed.

Reads, appends and merges filter their events through the ledger of erasures; `erase` then rewrites the files that still
hold erased events. A rewritten file keeps its name and its time, even if it is empty.

A log of another kind of events, such as impressions, has the same layout in its own folder.
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog

from models.files import Stamp, each_file, rename_durably, stamp_of, status_of
from services.features.schema import LogPosition
from services.stream.log.files import Span, choose_merge, current, span_of
from services.stream.log.kinds import INTERACTIONS, Logged, LogKind
from services.stream.log.ledger import Erased, ErasureLedger

KEEP_PARTS_S = 3_600.0
"""How long merged files stay for readers that have listed them."""
_OPEN_DAYS = 2
_DAY_S = 86_400.0
MAX_REMOVED = 256
"""Maximum number of files that a call of `compact` removes."""
_OF_ONE_FILE = {errno.EIO, errno.EISDIR}
_SETTLED_S = 60.0
"""A scratch file of this age was left by a crash."""
_Loaded = TypeVar("_Loaded")
_log = structlog.get_logger()
_EVENTS = cast("LogKind[Any]", INTERACTIONS)


@dataclass(frozen=True, slots=True)
class Erasing:
    """The result of a pass over a partition's files: rewritten, unreadable, and scratch files that may be in use."""

    num_rewritten: int = 0
    num_unreadable: int = 0
    num_scratch: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every file is free of erased events."""
        return not (self.num_unreadable or self.num_scratch)


class OfflineLog(Generic[Logged]):
    """The files of raw events of one kind below one folder, filtered by the ledger of erasures."""

    def __init__(
        self,
        root: Path,
        wall_clock: Callable[[], float] = time.time,
        kind: LogKind[Logged] = _EVENTS,
        ledger: ErasureLedger | None = None,
    ) -> None:
        """Take the folder of all logs.

        Several logs may share a `ledger`; without it, the folder's erasures are read from disk.
        """
        self._root = root / kind.name
        self._kind = kind
        self.ledger = ledger or ErasureLedger(root)
        self._writing = threading.Lock()
        self._wall_clock = wall_clock
        self._last: dict[tuple[str, int], int | None] = {}
        self._earlier_s: dict[Path, float] = {}
        self._bad: dict[Path, Stamp] = {}

    @property
    def kind(self) -> LogKind[Logged]:
        return self._kind

    @property
    def unreadable(self) -> list[Path]:
        """The unreadable files that have not changed since. Thread-safe."""
        return [path for path in list(self._bad) if self._is_bad(path)]

    def _is_bad(self, path: Path) -> bool:
        return path in self._bad and self._bad[path] == stamp_of(path)

    def last_offset(self, topic_id: str, partition: int) -> int | None:
        """Return the offset of the last event on disk; None without events."""
        key = (topic_id, partition)
        if key not in self._last:
            self._last[key] = _last_offset(self._folder(topic_id, partition))
        return self._last[key]

    def forget(self) -> None:
        """Read the disk again at the next call: another process may have written since."""
        self._last.clear()
        self._earlier_s.clear()

    def topic_ids(self, partition: int) -> list[str]:
        """Return the topics of a partition in order of creation."""
        return [folder.name for folder in self._folders(partition)]

    def append(self, events: Sequence[Logged]) -> None:
        """Write events of one partition and topic, in rising offset order, as one file; skip events already on disk."""
        if not events:
            return
        topic_id, partition = events[0].position.topic_id, events[0].position.partition
        last = self.last_offset(topic_id, partition)
        new = [event for event in events if last is None or event.position.offset > last]
        if not new:
            return
        span = Span(new[0].position.offset, new[-1].position.offset)
        topic, now_s = self._folder(topic_id, partition), self._wall_clock()
        day = max([_day(now_s), *(folder.name for folder in _days(topic)[1:])])
        earlier_s = self._newest_of_others(topic)
        written_s = None if now_s > earlier_s else earlier_s + 1
        with self._writing:
            table = self._kind.without_erased(self._kind.table(new), self._erased(partition))
            _write_atomically(topic / day / span.name, table, written_s)
        self._last[topic_id, partition] = span.last

    def compact(self, partition: int, now_s: float) -> int:
        """Merge some neighbouring small files of a partition, and remove files merged an hour ago. A bounded step.

        Looks only at the two newest days of each topic. Returns the number of merged files, 0 if no merge is
        worthwhile. `now_s` is Unix time.
        """
        for topic in self._folders(partition):
            for folder in _days(topic)[-_OPEN_DAYS:]:
                spans = _spans(folder)
                unreadable = {span for span in spans if self._is_bad(folder / span.name)}
                readable = set(spans) - unreadable
                kept = current(readable)
                with self._writing:
                    _remove_parts(folder, readable - set(kept), kept, now_s)
                has_ended = folder != topic and folder.name < _day(now_s)
                if parts := choose_merge(kept, unreadable, has_ended=has_ended):
                    with self._writing:
                        return self._merge(partition, folder, parts)
        return 0

    def erase(self, partition: int, changed_since_s: float = 0.0) -> Erasing:
        """Rewrite a partition's files with erased events, including merged parts, and remove scratch files of a crash.

        Files that have not changed since `changed_since_s` (their ctime, Unix s) are skipped. May be repeated. Raises
        OSError if a folder cannot be listed.
        """
        with self._writing:
            pass  # a write that began before the erasure has ended
        num_rewritten = num_unreadable = num_scratch = 0
        for path in each_file(self._root / f"partition={partition}"):
            with self._writing:
                status = status_of(path)
                if status is None or status.st_ctime < changed_since_s:
                    continue
                if path.suffix == ".tmp":
                    if status.st_ctime < self._wall_clock() - _SETTLED_S:
                        path.unlink(missing_ok=True)
                    else:
                        num_scratch += 1
                    continue
                table = self._load(path, pq.ParquetFile.read)
                if table is None:
                    num_unreadable += path.exists()
                    continue
                now_ms = int(self._wall_clock() * 1_000)
                left = self._kind.without_erased(table, self._erased(partition), now_ms)
                if left.num_rows < table.num_rows:
                    _write_atomically(path, left, written_s=status.st_mtime)
                    num_rewritten += 1
        return Erasing(num_rewritten, num_unreadable, num_scratch)

    def remove_days(self, partition: int, keep_days: int, now_s: float) -> list[Path]:
        """Remove a partition's days that ended at least `keep_days` days ago, and return their folders.

        `now_s` is Unix time.
        """
        oldest = _day(now_s - keep_days * _DAY_S)
        old = [day for topic in self._folders(partition) for day in _days(topic) if day != topic and day.name < oldest]
        with self._writing:
            for day in old:
                shutil.rmtree(day)
        return old

    def read(
        self, partition: int, not_before_ms: int = 0, after: LogPosition | None = None, user_id: str | None = None
    ) -> Iterator[Logged]:
        """Yield a partition's events, each once: topics in order of creation, offsets rising.

        Skips files last written before `not_before_ms` (Unix ms), events at or before `after`, and, with `user_id`,
        other users' events.
        """
        folders = self._folders(partition)
        if after is not None:
            earlier = [number for number, folder in enumerate(folders) if folder.name == after.topic_id]
            folders = folders[earlier[0] if earlier else 0 :]
        for folder in folders:
            last = after.offset if after is not None and folder.name == after.topic_id else -1
            yield from self._of_topic(partition, _paths(folder), last, not_before_ms, user_id)

    def _of_topic(
        self, partition: int, paths: dict[Span, Path], last: int, not_before_ms: int, user_id: str | None
    ) -> Iterator[Logged]:
        """Yield the events of a topic's files after the offset `last`."""
        left, erased = current(paths), self._erased(partition)

        def parse(file: pq.ParquetFile) -> list[Logged]:
            table = file.read() if user_id is None else _rows_of(file, user_id)
            if table is None:
                return []
            return [self._kind.from_row(row) for row in self._kind.without_erased(table, erased).to_pylist()]

        while left:
            span = left.pop(0)
            stamp = stamp_of(paths[span]) if span.last > last else None
            if stamp is None or stamp[1] < not_before_ms * 1_000_000:
                continue
            events = self._load(paths[span], parse)
            if events is None:
                del paths[span]
                left = current(paths)  # the files that it was merged from may still exist
            for event in events or ():
                if event.position.offset > last:
                    last = event.position.offset
                    yield event

    def _load(self, path: Path, parse: Callable[[pq.ParquetFile], _Loaded]) -> _Loaded | None:
        """Return what `parse` makes of a file; None for an unreadable file, which is logged once.

        Raises OSError if the whole disk fails.
        """
        stamp = stamp_of(path)
        if stamp is None or self._is_bad(path):
            return None
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # removed meanwhile
            return None
        except OSError as error:
            if error.errno not in _OF_ONE_FILE:
                raise
            self._leave_out(path, stamp, error)
            return None
        try:
            return parse(pq.ParquetFile(pa.BufferReader(data)))
        except Exception as error:  # noqa: BLE001 - whatever a reader raises at such bytes
            self._leave_out(path, stamp, error)
            return None

    def _leave_out(self, path: Path, stamp: Stamp, error: Exception) -> None:
        self._bad[path] = stamp
        _log.error("stream.file_unreadable", path=str(path), error=repr(error))

    def _erased(self, partition: int) -> Erased:
        """Return a partition's erasures.

        Raises OSError for an unreadable ledger: reading without it would bring users back.
        """
        return self.ledger.erased(partition)

    def _merge(self, partition: int, folder: Path, parts: Sequence[Span]) -> int:
        """Write neighbours as one file that is as old as the newest part; the parts stay.

        Return the number of merged files, 0 if a part is unreadable.
        """
        paths = [folder / part.name for part in parts]
        tables = [table for path in paths if (table := self._load(path, pq.ParquetFile.read)) is not None]
        times = [status.st_mtime for path in paths if (status := status_of(path))]
        if min(len(tables), len(times)) < len(paths):
            return 0
        merged = folder / Span(parts[0].first, parts[-1].last).name
        table = self._kind.without_erased(pa.concat_tables(tables, promote_options="default"), self._erased(partition))
        _write_atomically(merged, table, written_s=max(times))
        return len(parts)

    def _newest_of_others(self, topic: Path) -> float:
        """Return when the partition's earlier topics were last written (Unix s)."""
        if topic not in self._earlier_s:
            others = [folder for folder in topic.parent.glob("*") if folder != topic]
            self._earlier_s[topic] = max(map(_last_written, others), default=0.0)
        return self._earlier_s[topic]

    def _folder(self, topic_id: str, partition: int) -> Path:
        return self._root / f"partition={partition}" / topic_id

    def _folders(self, partition: int) -> list[Path]:
        """Return the folders of the topic ids in order of creation."""
        return sorted(self._root.glob(f"partition={partition}/*"), key=_created)


def _rows_of(file: pq.ParquetFile, user_id: str) -> pa.Table | None:
    """Return a user's rows. Most files have none: then only one column is read, without starting threads."""
    is_theirs = pc.equal(file.read(columns=["user_id"], use_threads=False)["user_id"], user_id)
    return file.read(use_threads=False).filter(is_theirs) if pc.any(is_theirs).as_py() else None


def _spans(folder: Path) -> list[Span]:
    return sorted(span for path in folder.glob("*-*.parquet") if (span := span_of(path)))


def _day(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).date().isoformat()


def _days(topic: Path) -> list[Path]:
    """Return a topic's folders with files, oldest first: its own (files older than day folders), then its days."""
    return [topic, *sorted(path for path in topic.iterdir() if path.is_dir())] if topic.exists() else []


def _paths(topic: Path) -> dict[Span, Path]:
    return {span: folder / span.name for folder in _days(topic) for span in _spans(folder)}


def _last_offset(topic: Path) -> int | None:
    for folder in reversed(_days(topic)):
        if spans := _spans(folder):
            return max(span.last for span in spans)
    return None


def _last_written(topic: Path) -> float:
    """Return the time of a topic's newest file (Unix s); 0 without one."""
    for folder in reversed(_days(topic)):
        if times := _times(folder):
            return max(times)
    return 0.0


def _created(topic: Path) -> tuple[float, str]:
    """Return the age of a topic's oldest file, and its id."""
    for folder in _days(topic):
        if times := _times(folder):
            return times[0], topic.name
    return 0.0, topic.name


def _times(folder: Path) -> list[float]:
    """Return when a folder's current files were written (Unix s), by offset, without files removed meanwhile."""
    statuses = (status_of(folder / span.name) for span in current(_spans(folder)))
    return [status.st_mtime for status in statuses if status is not None]


def _remove_parts(folder: Path, parts: set[Span], kept: Sequence[Span], now_s: float) -> None:
    """Remove files that have lain within another file for an hour, and scratch files of a crash."""
    wholes = {span: status for span in kept if parts and (status := status_of(folder / span.name))}
    settled = [span for span, status in wholes.items() if status.st_ctime < now_s - KEEP_PARTS_S]
    old = [
        part
        for part in sorted(parts)
        if any(whole.first <= part.first and part.last <= whole.last for whole in settled)
    ]
    for part in old[:MAX_REMOVED]:
        (folder / part.name).unlink(missing_ok=True)
    for scratch in folder.glob("*.tmp"):
        if (status := status_of(scratch)) and status.st_mtime < now_s - KEEP_PARTS_S:
            scratch.unlink(missing_ok=True)


def _write_atomically(path: Path, table: pa.Table, written_s: float | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        pq.write_table(table, scratch, compression="zstd")
        if written_s is not None:
            os.utime(scratch, (written_s, written_s))
        rename_durably(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)  # each restart on a full disk would leave another file
