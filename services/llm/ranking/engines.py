"""The engines of a replica by model name: an engine for each version that a loaded name serves."""

import gc
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

import structlog

from models.registry.bundle import Bundle
from models.registry.bundle_follower import BundleFollower, Serving, due_names
from models.registry.store import BundleStore
from services.errors import BundleMismatch, BundleNotFound, EnvironmentFault
from services.llm.engine.kv.memory import KvMemory
from services.llm.ranking.shared_engines import RunningBundle
from services.residency.state import ModelBytes

log = structlog.get_logger()

_UNLOAD_S = 60.0


Start = Callable[[str, Bundle, Sequence[KvMemory]], RunningBundle | None]
"""Loads a bundle of a name and runs its engine, in one of these KV memories if it fits.

Returns None for an items-only bundle: its requests are refused as before the first bundle.
"""


class Engines:
    """The engines of a name's serving versions: the live version's and, during a release, the canary's.

    Requests that began on a version finish on it after it stops serving: an engine without another user ends when it
    has no work left, then its weights are freed. A version that finds no memory is rejected; for a candidate, users
    then get the student.
    """

    def __init__(
        self,
        store: BundleStore,
        start: Callable[[Bundle], RunningBundle | None],
        report: Callable[[Serving[RunningBundle | None]], object],
        reserve: Callable[[Sequence[Bundle]], bool] = lambda bundles: True,
    ) -> None:
        """Load the name's versions.

        `report` is called after each change; `reserve` returns whether there is memory for these bundles.
        """
        self._report = report
        self._reserve = reserve
        self._serving: Serving[RunningBundle | None] = Serving()
        self._bundles: dict[str, Bundle] = {}
        self._ending: list[RunningBundle] = []
        self._start = start
        self.follower = BundleFollower(store, self._load, self._swap)
        self.refresh()

    @property
    def is_broken(self) -> bool:
        """Whether a version that serves under the name could not be loaded at the last attempt."""
        return bool(self.follower.failed)

    def of(self, version: str) -> RunningBundle:
        """Return the running bundle of a version.

        Raises BundleMismatch, or BundleNotFound before the first is loaded.
        """
        serving = self._serving
        if (running := serving.loaded.get(version)) is not None:
            return running
        if not any(serving.loaded.values()):
            raise BundleNotFound("no bundle is loaded yet")
        raise BundleMismatch(version, " and ".join(serving.loaded))

    def refresh(self) -> None:
        """Follow the name's record. Never raises."""
        self.follower.refresh()

    def check_health(self, max_step_s: float) -> None:
        """Raise RuntimeError with the cause when an engine's thread hangs or has died."""
        for running in self._running:
            running.thread.check_health(max_step_s)

    def stop(self) -> None:
        """Give the engines up; those without another user end after the requests in flight. Does not wait."""
        self._report(Serving())
        self._ending = [running for running in self._running if running.leave()]

    def join(self, timeout_s: float) -> None:
        """Wait until the stopped threads have ended."""
        for running in self._ending:
            running.thread.join(timeout_s)

    @property
    def _running(self) -> list[RunningBundle]:
        return [running for running in self._serving.loaded.values() if running is not None]

    def _load(self, bundle: Bundle) -> RunningBundle | None:
        self._bundles[bundle.version] = bundle
        if not self._reserve([self._bundles[version] for version in {*self._serving.loaded, bundle.version}]):
            raise EnvironmentFault(f"TAILRACE_LLM_MEMORY_GIB: no room for {bundle.version} yet")
        try:
            return self._start(bundle)
        except BaseException:
            self._reserve([self._bundles[version] for version in self._serving.loaded])
            raise

    def _swap(self, serving: Serving[RunningBundle | None]) -> None:
        before, self._serving = self._serving, serving
        self._report(serving)
        if before.loaded.keys() == serving.loaded.keys():
            return
        log.info("bundle_loaded", version=" and ".join(serving.loaded), before=" and ".join(before.loaded) or None)
        for version, running in before.loaded.items():
            if version not in serving.loaded and running is not None:
                running.leave()
        del before
        self._bundles = {version: self._bundles[version] for version in serving.loaded}
        self._reserve(list(self._bundles.values()))
        gc.collect()


class EngineSource:
    """Loads the engines of names for `Residents`. Engines with one KV layout share one KV pool."""

    def __init__(
        self,
        store: BundleStore,
        start: Start,
        report: Callable[[str, Serving[RunningBundle | None]], object],
        size_of: Callable[[Bundle], ModelBytes] | None,
        resize: Callable[[str, ModelBytes], bool],
    ) -> None:
        """`size_of` returns the bytes that a bundle will take; None if they do not matter.

        `resize` tells the residency the bytes of a name, and returns whether they fit.
        """
        self._store = store
        self._start = start
        self._report = report
        self._size_of = size_of
        self._resize = resize
        self._memories: WeakSet[KvMemory] = WeakSet()

    def fetch(self, name: str) -> ModelBytes:
        """Download the versions that serve under a name. Raises StoreUnavailable, BundleError or OSError."""
        if self._size_of is None:
            return ModelBytes(0)
        store = self._store.named(name)
        return ModelBytes.sum(map(self._size_of, (store.open(version) for version in store.record().serving)))

    def load(self, name: str) -> Engines:
        return Engines(
            self._store.named(name),
            lambda bundle: self._start_sharing(name, bundle),
            lambda serving: self._report(name, serving),
            lambda bundles: self._reserve(name, bundles),
        )

    def due(self, models: Mapping[str, Engines]) -> list[str]:
        """Return the names whose records have changed, or with a version to load."""
        return due_names({name: engines.follower for name, engines in models.items()})

    def refresh(self, name: str, model: Engines) -> None:
        """Follow the name's record."""
        model.refresh()

    def is_broken(self, model: Engines) -> bool:
        """Whether a version of the name could not be loaded."""
        return model.is_broken

    def unload(self, name: str, model: Engines) -> None:
        """Stop the name's engines and free their memory."""
        model.stop()
        model.join(_UNLOAD_S)
        gc.collect()

    def _reserve(self, name: str, bundles: Sequence[Bundle]) -> bool:
        return self._size_of is None or self._resize(name, ModelBytes.sum(map(self._size_of, bundles)))

    def _start_sharing(self, name: str, bundle: Bundle) -> RunningBundle | None:
        running = self._start(name, bundle, list(self._memories))
        if running is not None:
            self._memories.add(running.bundle.engine.memory)
        return running
