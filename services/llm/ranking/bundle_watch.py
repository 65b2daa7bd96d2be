"""Keeps the live bundle loaded: watches the pointer, loads a new version beside the old, then swaps.

Requests that began on the old version finish on it: its engine thread ends only when it has nothing left, and only then
is its memory freed. What fails to load is reported and the old version goes on; it is tried again when the pointer has moved
to another version and back, or while there is nothing else to serve. A thread of its own, so that loading stalls nobody.
"""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from models.bundle_follower import PointerNews
from models.registry import Bundle, BundleStore
from services.errors import BundleNotFound
from services.llm.ranking.model import LoadedBundle
from services.llm.serving.engine_thread import EngineThread

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded bundle and the thread that runs its engine."""

    bundle: LoadedBundle
    thread: EngineThread


class BundleWatch:
    """Owns what is being served. `load` makes a bundle ready, `start` runs its engine."""

    def __init__(
        self,
        store: BundleStore,
        poll_s: float,
        load: Callable[[Bundle], LoadedBundle],
        start: Callable[[LoadedBundle], EngineThread],
    ) -> None:
        self._store = store
        self._poll_s = poll_s
        self._load = load
        self._start = start
        self._serving: Serving | None = None
        self._news = PointerNews()
        self._stopped = threading.Event()
        self._refresh()
        self._thread = threading.Thread(target=self._watch, name="bundle-watch", daemon=True)
        self._thread.start()

    def current(self) -> Serving:
        """Return what serves now. Raises BundleNotFound while nothing is loaded."""
        if self._serving is None:
            raise BundleNotFound("no bundle is loaded yet")
        return self._serving

    def check_health(self) -> None:
        """Raise when the engine or the watch has died, saying why."""
        if self._serving is not None and not self._serving.thread.is_alive:
            raise RuntimeError("the engine thread died") from self._serving.thread.failure
        if not self._thread.is_alive():
            raise RuntimeError("the bundle watch died")

    def stop(self) -> None:
        """End both threads, after what is in flight."""
        self._stopped.set()
        if self._serving is not None:
            self._serving.thread.stop()

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_s):
            self._refresh()

    def _refresh(self) -> None:
        loaded = None if self._serving is None else self._serving.bundle.version
        try:
            version = self._store.live_version()
            if self._news.is_to_load(version, loaded):
                self._swap(self._load(self._store.open(version)))
        except Exception as error:  # a bad bundle or pointer, however bad, must not end what serves
            log.exception("bundle_refused", version=self._news.tried, loaded=loaded, error=str(error))

    def _swap(self, bundle: LoadedBundle) -> None:
        before, self._serving = self._serving, Serving(bundle, self._start(bundle))
        log.info("bundle_loaded", version=bundle.version, before=None if before is None else before.bundle.version)
        if before is not None:
            before.thread.stop()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
