"""Follows the live pointer: polls it, loads a new version in a thread of its own, and swaps it in when it is ready.

A version that fails to load is logged and the version before it stays loaded. It is tried again once the pointer has moved to
another version and back, or while nothing else is loaded. It does not know what is loaded from a bundle.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeGuard, TypeVar

import structlog

from models.registry import Bundle, BundleStore

log = structlog.get_logger()

Loaded = TypeVar("Loaded")


class BundleFollower(Generic[Loaded]):
    """Calls `load` for each version that the pointer names, then `swap` with the result, both off the caller's thread after `start`."""

    def __init__(
        self, store: BundleStore, poll_s: float, load: Callable[[Bundle], Loaded], swap: Callable[[Loaded], None]
    ) -> None:
        self._store = store
        self._poll_s = poll_s
        self._load = load
        self._swap = swap
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="bundle-follower", daemon=True)
        self.loaded: str | None = None
        """The version that was swapped in last."""
        self.tried: str | None = None
        """The version tried last, unless the pointer has named none or the loaded one since."""

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
        try:
            version = self._store.live_version()
            if self._is_due(version):
                self._swap(self._load(self._store.open(version)))
                self.loaded = version
        except Exception as error:  # whatever a bundle or the pointer fails with, the loaded version must go on serving
            log.exception("bundle_refused", version=self.tried, loaded=self.loaded, error=repr(error))

    def _follow(self) -> None:
        while not self._stopped.wait(self._poll_s):
            self.refresh()

    def _is_due(self, version: str | None) -> TypeGuard[str]:
        """Return whether to load the version that the pointer names (None: no version), and record it as tried."""
        if self.loaded is None:
            self.tried = version
            return version is not None
        if version in {None, self.loaded}:
            self.tried = None
            return False
        is_new = version != self.tried
        self.tried = version
        return is_new
