"""The ledger of erasures: erased users, and the log position of each erasure. Every reader of events filters by it.

    <offline log>/erasures/partition=<P>.parquet   one row per erasure of the partition's users, in log order
    <offline log>/erasures/salt                    the key of the digests, created with the first digest

A row names its user by a salted digest, so that tables that hold the user are read without them; the id itself is kept
only until all stores are done. A file is replaced whole, under a lock, so that no process's change is lost, not even a
paused process's.
"""

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from models.files import Stamp, rename_durably, stamp_of
from services.features.schema import BASE_TOPIC, LogPosition
from services.stream.decode import LoggedErasure

_FOLDER = "erasures"
_DIGEST_BYTES = 16
_LOCK_TIMEOUT_S = 30.0
_SCHEMA = pa.schema(
    [
        ("erasure_id", pa.string()),
        ("digest", pa.binary(_DIGEST_BYTES)),
        ("user_id", pa.string()),
        ("topic_id", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("earlier_topics", pa.list_(pa.string())),
        ("accepted_time_ms", pa.int64()),
        ("done_time_ms", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """One erasure.

    `user_id` is None once it is done, at `done_time_ms` (Unix ms); `earlier_topics` all end before it.
    """

    erasure_id: str
    digest: bytes
    user_id: str | None
    position: LogPosition
    earlier_topics: tuple[str, ...]
    accepted_time_ms: int
    done_time_ms: int | None = None

    def covers(self, position: LogPosition) -> bool:
        return self.position.covers(position) or position.topic_id in self.earlier_topics


class Erased:
    """The newest erasure of each user of some partitions, looked up by user id."""

    def __init__(self, digest_of: Callable[[str], bytes], tombstones: Sequence[Tombstone]) -> None:
        """Take the tombstones, each partition's in log order."""
        self._digest_of = digest_of
        self._newest: Mapping[bytes, Tombstone] = {tombstone.digest: tombstone for tombstone in tombstones}

    def __bool__(self) -> bool:
        return bool(self._newest)

    def of(self, user_id: str) -> Tombstone | None:
        return self._newest.get(self._digest_of(user_id)) if self._newest else None

    def covers(self, user_id: str, position: LogPosition) -> bool:
        """Return whether an erasure covers this user's event at this log position."""
        tombstone = self.of(user_id)
        return tombstone is not None and tombstone.covers(position)

    def covers_row(self, user_id: str, position: LogPosition, row_time_us: int) -> bool:
        """Return whether an erasure covers a user's row: by its last event's position, for base rows by its time."""
        if position.topic_id == BASE_TOPIC:
            return self.covers_time(user_id, row_time_us // 1_000)
        return self.covers(user_id, position)

    def covers_time(self, user_id: str | None, time_ms: int) -> bool:
        """Return whether an erasure covers an event or impression of this user at this time (Unix ms)."""
        tombstone = self.of(user_id) if user_id is not None else None
        return tombstone is not None and time_ms <= tombstone.accepted_time_ms


class ErasureLedger:
    """The erasures below one offline log. Safe for any thread and process."""

    def __init__(self, offline_log_dir: Path) -> None:
        self._root = offline_log_dir / _FOLDER
        self._salt = b""
        self._read: dict[int, tuple[Stamp | None, tuple[Tombstone, ...], Erased]] = {}
        self._threads = threading.Lock()

    @staticmethod
    def owns(path: Path) -> bool:
        """Return whether a file below the offline log is part of the ledger."""
        return path.parent.name == _FOLDER

    @property
    def partitions(self) -> list[int]:
        """The partitions with erasures."""
        names = (path.stem.partition("=")[2] for path in self._root.glob("partition=*.parquet"))
        return sorted(int(name) for name in names if name.isdigit())

    def tombstones(self, partition: int) -> tuple[Tombstone, ...]:
        """Return a partition's erasures in log order. Raises OSError for an unreadable ledger."""
        return self._of(partition)[0]

    def erased(self, partition: int) -> Erased:
        """Return a partition's erasures by user. Raises OSError for an unreadable ledger."""
        return self._of(partition)[1]

    def everybody(self) -> Erased:
        """Return the erasures of all partitions by user. Raises OSError for an unreadable ledger."""
        return Erased(
            self.digest, [tombstone for partition in self.partitions for tombstone in self.tombstones(partition)]
        )

    def append(self, erasures: Sequence[LoggedErasure], topic_ids: Collection[str]) -> None:
        """Add new erasures of a partition, in log order. `topic_ids` are the log's topics so far. Raises OSError."""
        if not erasures:
            return
        partition = erasures[0].position.partition
        with self._locked():
            self._make_salt()
            before = self.tombstones(partition)
            known = {tombstone.position for tombstone in before}
            new = [
                Tombstone(
                    erasure_id=logged.erasure.erasure_id,
                    digest=self.digest(logged.erasure.erased_id),
                    user_id=logged.erasure.user_id,
                    position=logged.position,
                    earlier_topics=tuple(topic for topic in topic_ids if topic != logged.position.topic_id),
                    accepted_time_ms=logged.erasure.accepted_time_ms,
                )
                for logged in erasures
                if logged.position not in known
            ]
            if new:
                self._write(partition, [*before, *new])

    def close(self, partition: int, erasure_ids: Collection[str], now_ms: int) -> None:
        """Record that these erasures are done everywhere, and forget the users' ids. Raises OSError."""
        with self._locked():
            rows = self.tombstones(partition)
            done = set(erasure_ids)
            self._write(
                partition,
                [
                    replace(tombstone, user_id=None, done_time_ms=now_ms) if tombstone.erasure_id in done else tombstone
                    for tombstone in rows
                ],
            )

    def digest(self, user_id: str) -> bytes:
        """Return the digest that replaces a user's id in the ledger."""
        return blake2b(user_id.encode(), key=self._salt, digest_size=_DIGEST_BYTES).digest()

    def _of(self, partition: int) -> tuple[tuple[Tombstone, ...], Erased]:
        path = self._path(partition)
        stamp = stamp_of(path)
        cached = self._read.get(partition)
        if cached is None or cached[0] != stamp:
            rows = () if stamp is None else _rows(path)
            self._salt = self._salt or ((self._root / "salt").read_bytes() if rows else b"")
            cached = self._read[partition] = (stamp, rows, Erased(self.digest, rows))
        return cached[1], cached[2]

    def _write(self, partition: int, rows: Sequence[Tombstone]) -> None:
        path = self._path(partition)
        scratch = path.with_suffix(".tmp")
        pq.write_table(
            pa.Table.from_pylist([_plain(tombstone) for tombstone in rows], schema=_SCHEMA), scratch, compression="zstd"
        )
        rename_durably(scratch, path)

    def _make_salt(self) -> None:
        path = self._root / "salt"
        if not path.exists():
            scratch = path.with_suffix(".tmp")
            scratch.write_bytes(secrets.token_bytes(32))
            rename_durably(scratch, path)
        self._salt = path.read_bytes()

    def _path(self, partition: int) -> Path:
        return self._root / f"partition={partition}.parquet"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        with self._threads, FileLock(self._root / "LOCK", timeout=_LOCK_TIMEOUT_S):
            yield


def _rows(path: Path) -> tuple[Tombstone, ...]:
    """Read a file. Raises OSError, also for a malformed table: continuing without it would bring users back."""
    try:
        plain = pq.ParquetFile(path).read().to_pylist()
        return tuple(_tombstone(row) for row in plain)
    except (pa.ArrowException, KeyError) as error:
        raise OSError(f"{path} cannot be read: {error}") from error


def _plain(tombstone: Tombstone) -> dict[str, Any]:
    position = tombstone.position
    return {
        "erasure_id": tombstone.erasure_id,
        "digest": tombstone.digest,
        "user_id": tombstone.user_id,
        "topic_id": position.topic_id,
        "partition": position.partition,
        "offset": position.offset,
        "earlier_topics": list(tombstone.earlier_topics),
        "accepted_time_ms": tombstone.accepted_time_ms,
        "done_time_ms": tombstone.done_time_ms,
    }


def _tombstone(row: dict[str, Any]) -> Tombstone:
    position = LogPosition(row.pop("topic_id"), row.pop("partition"), row.pop("offset"))
    return Tombstone(position=position, earlier_topics=tuple(row.pop("earlier_topics")), **row)
