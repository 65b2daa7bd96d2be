"""Follows a model name: reads its record, loads its versions, and hands over changes, each time it is called.

The versions are the live version and, during a release, the canary. The live version is loaded first, and each version
is handed over when it is ready, so the two load and fail independently. If a new live version fails to load, the
previous version stays; if a canary fails to load, all users get the live version. A promoted canary is already loaded.
Versions that no longer serve are released before any other version is loaded.

A failed version is retried after a second, with the pause doubling after each consecutive failure up to a minute, and
immediately when the name has moved away from the version and returns: the cause may be a disk, a mount or memory. A
version with corrupt content is never retried by this process. The follower does not know what is loaded from a bundle.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from models.errors import BundleCorrupt, BundleIncomplete, StoreUnavailable
from models.registry.bundle import Bundle
from models.registry.canary import Canary
from models.registry.name_record import NameRecord
from models.registry.store import BundleStore

log = structlog.get_logger()

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_READ_AGAIN_S = 60.0
"""A record is read again after this time, though its mark is the same: the read or the mark may have been wrong."""

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Serving(Generic[Loaded]):
    """The versions that serve under a name in this process.

    Args:
        live: The live version; while a new live version cannot be loaded, the previous version. None before the first.
        canary: The current release, if its candidate is loaded.
        loaded: Loaded objects by version; contains only the live version and the candidate.
    """

    live: str | None = None
    canary: Canary | None = None
    loaded: Mapping[str, Loaded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Failure:
    """Time of the next retry of a failed version, and the length of the last pause."""

    pause_s: float
    retry_at_s: float


class BundleFollower(Generic[Loaded]):
    """Calls `load` for each new version of a name, and `hand_over` when the serving versions change."""

    def __init__(
        self,
        store: BundleStore,
        load: Callable[[Bundle], Loaded],
        hand_over: Callable[[Serving[Loaded]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the callbacks. `hand_over` must not fail."""
        self.store = store
        self._load = load
        self._hand_over = hand_over
        self._clock = clock
        self.serving: Serving[Loaded] = Serving()
        """The serving versions that were handed over last."""
        self.is_record_corrupt = False
        """Whether the name's record could not be decoded at the last read."""
        self._read: tuple[NameRecord, str | None, float] | None = None
        """The record, its mark and the time, unless the last read failed."""
        self._corrupt: set[str] = set()
        self._failed: dict[str, _Failure] = {}

    @property
    def failed(self) -> frozenset[str]:
        """The versions that serve under the name and could not be loaded at the last attempt."""
        return frozenset(self._failed)

    def is_due(self, marks: Mapping[str, str] | None) -> bool:
        """Whether `refresh` may have work, by the marks of the names' records; None if they are unknown."""
        if self._read is None:
            return True
        record, mark, read_s = self._read
        has_changed = marks is not None and (mark is None or mark != marks.get(self.store.name))
        is_missing = any(version not in self.serving.loaded and self._is_due(version) for version in record.serving)
        return has_changed or is_missing or self._clock() >= read_s + _READ_AGAIN_S

    def refresh(self) -> None:
        """Read the record once and load its versions if they are due. Never raises."""
        try:
            if (record := self._record()) is None:
                return
            self._failed = {version: failure for version, failure in self._failed.items() if version in record.serving}
            self._settle(record, self.serving.loaded)
            for version in record.serving:
                if version not in self.serving.loaded and self._is_due(version):
                    self._try(version, record)
        except Exception as error:  # loaded versions must keep serving
            log.exception("name_unreadable", name=self.store.name, live=self.serving.live, error=repr(error))

    def _record(self) -> NameRecord | None:
        """Return the name's record.

        If it cannot be decoded, return this machine's last valid record before the first load, otherwise None.
        """
        self._read, now_s = None, self._clock()
        try:
            record, mark = self.store.marked_record()
        except BundleCorrupt as error:
            if not self.is_record_corrupt:
                log.exception("name_record_corrupt", name=self.store.name, live=self.serving.live, error=str(error))
            self.is_record_corrupt = True
            return self.store.last_valid_record() if self.serving.live is None else None
        self.is_record_corrupt = False
        self._read = record, mark, now_s
        return record

    def _try(self, version: str, record: NameRecord) -> None:
        try:
            loaded = self._load(self.store.open(version))
        except Exception as error:  # the other versions must keep serving
            log.exception("bundle_refused", version=version, live=self.serving.live, error=repr(error))
            self._record_failure(version, error)
            return
        self._failed.pop(version, None)
        self._settle(record, {**self.serving.loaded, version: loaded})

    def _settle(self, record: NameRecord, loaded: Mapping[str, Loaded]) -> None:
        """Hand over the loaded versions that serve by this record, if they differ from the last handover."""
        live = record.live if record.live in loaded else self.serving.live
        canary = record.canary if record.canary is not None and record.canary.version in loaded else None
        kept = {version: bundle for version, bundle in loaded.items() if version == live or version in record.serving}
        if (live, canary, kept.keys()) != (self.serving.live, self.serving.canary, self.serving.loaded.keys()):
            self.serving = Serving(live, canary, kept)
            self._hand_over(self.serving)

    def _is_due(self, version: str) -> bool:
        """Whether the version is due for a load attempt."""
        failure = self._failed.get(version)
        return version not in self._corrupt and (failure is None or self._clock() >= failure.retry_at_s)

    def _record_failure(self, version: str, error: Exception) -> None:
        if isinstance(error, BundleCorrupt) and not isinstance(error, BundleIncomplete):
            self._corrupt.add(version)
        before = self._failed.get(version)
        pause_s = _FIRST_PAUSE_S if before is None else min(_MAX_PAUSE_S, 2 * before.pause_s)
        self._failed[version] = _Failure(pause_s, self._clock() + pause_s)


def due_names(followers: Mapping[str, BundleFollower[Any]]) -> list[str]:
    """Return the names of one storage whose followers may have work, by one look at all records. Never raises."""
    marks = None
    if first := next(iter(followers.values()), None):
        with suppress(StoreUnavailable):
            marks = first.store.marks(followers)
    return [name for name, follower in followers.items() if follower.is_due(marks)]
