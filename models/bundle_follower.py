"""Follows the live pointer: polls it, loads a new version in a thread of its own, and swaps it in when it is ready.

While a version fails to load, the version before it stays loaded. It is tried again after a second, twice as long after each failure in a row up to
a minute, and at once when the pointer names another one: the cause may be a disk, a mount or memory. A version whose content is
corrupt stays so, and is never tried again by this process. It does not know what is loaded from a bundle.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from models.bundle import Bundle
from models.errors import BundleCorrupt, BundleIncomplete
from models.registry import BundleStore

log = structlog.get_logger()

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0

Loaded = TypeVar("Loaded")


class BundleFollower(Generic[Loaded]):
    """Calls `load` for each version that the pointer names, then `swap` with the result, both off the caller's thread after `start`."""

    def __init__(
        self,
        store: BundleStore,
        poll_s: float,
        load: Callable[[Bundle], Loaded],
        swap: Callable[[Loaded], None],
        clock: Callable[[], float] = time.monotonic,
        polled: Callable[[], object] = lambda: None,
    ) -> None:
        """Keep the parts. `polled` is called after each look at the pointer."""
        self._store = store
        self._poll_s = poll_s
        self._load = load
        self._swap = swap
        self._clock = clock
        self._polled = polled
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="bundle-follower", daemon=True)
        self.loaded: str | None = None
        """The version that was swapped in last."""
        self._corrupt: set[str] = set()
        self._failed: str | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._retry_at_s = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Load the live version, if there is one, then follow the pointer in the background. Blocks while it loads."""
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current poll or load. Does not wait."""
        self._stopped.set()

    def refresh(self) -> None:
        """Poll the pointer once, and load and swap in the version that it names if it is due. Never raises."""
        version: str | None = None
        try:
            version = self._store.live_version()
            if version is None or version == self.loaded or not self._is_due(version):
                return
            self._swap(self._load(self._store.open(version)))
            self.loaded, self._failed = version, None
        except Exception as error:  # whatever a bundle or the pointer fails with, the loaded version must go on serving
            log.exception("bundle_refused", version=version, loaded=self.loaded, error=repr(error))
            if version is not None:
                self._record_failure(version, error)
        finally:
            self._polled()

    def _follow(self) -> None:
        while not self._stopped.wait(self._poll_s):
            self.refresh()

    def _is_due(self, version: str) -> bool:
        """Whether to try this version now."""
        if version in self._corrupt:
            return False
        return version != self._failed or self._clock() >= self._retry_at_s

    def _record_failure(self, version: str, error: Exception) -> None:
        if isinstance(error, BundleCorrupt) and not isinstance(error, BundleIncomplete):
            self._corrupt.add(version)
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s) if version == self._failed else _FIRST_PAUSE_S
        self._failed, self._retry_at_s = version, self._clock() + self._pause_s
