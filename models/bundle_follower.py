"""Follows a name: polls its record, loads the versions that it serves in a thread of its own, and hands over what serves when that changes.

Those are the live version and, during a release, the canary. The live one is loaded first, and each is handed over when it is ready, so neither waits for
the other or falls with it: while a new live version fails to load, the one before it stays, and while a candidate does, all users get the live one. A
promoted canary is loaded already. What no longer serves is let go of before anything else is loaded.

A version that fails is tried again after a second, twice as long after each failure in a row up to a minute, and at once when the name has left it and
comes back: the cause may be a disk, a mount or memory. A version whose content is corrupt stays so, and is never tried again by this process. It does not
know what is loaded from a bundle.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from models.bundle import Bundle
from models.canary import Canary
from models.errors import BundleCorrupt, BundleIncomplete
from models.name_record import NameRecord
from models.registry import BundleStore

log = structlog.get_logger()

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True)
class Serving(Generic[Loaded]):
    """What serves under a name in this process.

    Args:
        live: The version that is live here: the name's, or while that cannot be loaded the one before; None before the first.
        canary: The release under way, if its candidate is loaded.
        loaded: What was loaded, by version: of these two and no other.
    """

    live: str | None = None
    canary: Canary | None = None
    loaded: Mapping[str, Loaded] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Failure:
    """When a version that failed is tried again, and how long the pause was."""

    pause_s: float
    retry_at_s: float


class BundleFollower(Generic[Loaded]):
    """Calls `load` for each version that the name comes to serve, and `hand_over` with all that serves when it changes, both off the caller's thread after `start`."""

    def __init__(
        self,
        store: BundleStore,
        poll_s: float,
        load: Callable[[Bundle], Loaded],
        hand_over: Callable[[Serving[Loaded]], None],
        clock: Callable[[], float] = time.monotonic,
        polled: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep the parts. `hand_over` must not fail; `polled` is called after each look at the record."""
        self._store = store
        self._poll_s = poll_s
        self._load = load
        self._hand_over = hand_over
        self._clock = clock
        self._polled = polled
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="bundle-follower", daemon=True)
        self.serving: Serving[Loaded] = Serving()
        """What was handed over last."""
        self.is_record_corrupt = False
        """Whether the name's record could not be decoded when it was last read."""
        self._corrupt: set[str] = set()
        self._failed: dict[str, _Failure] = {}

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Load what the name serves, if it does, then follow it in the background. Blocks while it loads."""
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current poll or load. Does not wait."""
        self._stopped.set()

    def refresh(self) -> None:
        """Look at the record once, and load the versions that it names if they are due. Never raises."""
        try:
            if (record := self._record()) is None:
                return
            self._failed = {version: one for version, one in self._failed.items() if version in record.serving}
            self._settle(record, self.serving.loaded)
            for version in record.serving:
                if version not in self.serving.loaded and self._is_due(version):
                    self._try(version, record)
        except Exception as error:  # whatever the record fails with, what is loaded must go on serving
            log.exception("name_unreadable", name=self._store.name, live=self.serving.live, error=repr(error))
        finally:
            self._polled()

    def _record(self) -> NameRecord | None:
        """Return the name's record; where it cannot be decoded, the last valid one of this machine before anything is loaded, and None after."""
        try:
            record = self._store.record()
        except BundleCorrupt as error:
            if not self.is_record_corrupt:
                log.exception("name_record_corrupt", name=self._store.name, live=self.serving.live, error=str(error))
            self.is_record_corrupt = True
            return self._store.last_valid_record() if self.serving.live is None else None
        self.is_record_corrupt = False
        return record

    def _follow(self) -> None:
        while not self._stopped.wait(self._poll_s):
            self.refresh()

    def _try(self, version: str, record: NameRecord) -> None:
        try:
            loaded = self._load(self._store.open(version))
        except Exception as error:  # whatever a bundle fails with, the others must go on serving
            log.exception("bundle_refused", version=version, live=self.serving.live, error=repr(error))
            self._record_failure(version, error)
            return
        self._failed.pop(version, None)
        self._settle(record, {**self.serving.loaded, version: loaded})

    def _settle(self, record: NameRecord, loaded: Mapping[str, Loaded]) -> None:
        """Hand over what serves by this record, of what is loaded, if it is not what was handed over last."""
        live = record.live if record.live in loaded else self.serving.live
        canary = record.canary if record.canary is not None and record.canary.version in loaded else None
        kept = {version: one for version, one in loaded.items() if version == live or version in record.serving}
        if (live, canary, kept.keys()) != (self.serving.live, self.serving.canary, self.serving.loaded.keys()):
            self.serving = Serving(live, canary, kept)
            self._hand_over(self.serving)

    def _is_due(self, version: str) -> bool:
        """Whether to try this version now."""
        failure = self._failed.get(version)
        return version not in self._corrupt and (failure is None or self._clock() >= failure.retry_at_s)

    def _record_failure(self, version: str, error: Exception) -> None:
        if isinstance(error, BundleCorrupt) and not isinstance(error, BundleIncomplete):
            self._corrupt.add(version)
        before = self._failed.get(version)
        pause_s = _FIRST_PAUSE_S if before is None else min(_MAX_PAUSE_S, 2 * before.pause_s)
        self._failed[version] = _Failure(pause_s, self._clock() + pause_s)
