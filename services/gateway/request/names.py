"""The names that a gateway serves, and the bundle that answers a request.

Without a `NameResidency` all names are loaded at the start. With one, a name's bundle is loaded when it is first asked
for: requests wait for it within a part of their deadline, and are then answered with the popular items that its
manifest lists. A manifest that cannot be read in time is replaced by that of another name of the same tenant, the
tenant's default first. The manifests of all names are read in the background, so that their popular items are in
memory before they are asked for, and on this machine when the store is unavailable.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import structlog

from models.registry.bundle_follower import due_names
from models.registry.name_record import DEFAULT_NAME
from services.contracts.tenant import local_name, scoped_name, tenant_of_name
from services.errors import BundleError, DependencyUnavailable, InvalidRequest, StoreUnavailable, TailraceError
from services.gateway.request.live_bundle import Live, LiveBundle
from services.observability.metrics import ResidencyMetrics
from services.residency.residents import Residents
from services.residency.state import ModelBytes, Residency, ResidencyTable

log = structlog.get_logger()

_NUM_READING = _NUM_LEARNING = 8
"""Threads that read manifests: for requests, and in the background. A read takes a second in a slow store."""
_MAX_PARTIAL = 300
"""Names whose popular items are kept ready to answer, at about 30 kB each; packed, they take 6 kB."""
_LEARN_PAUSE_S = 0.1
_LOAD_SHARE, _MANIFEST_SHARE = 0.7, 0.2
"""Fractions of a request's wait: for the bundle, then its manifest, which is read meanwhile from a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameResidency:
    """Loads names when they are asked for. `budget_bytes` None: no limit; `pinned` are loaded at the start and stay."""

    budget_bytes: int | None
    min_stay_s: float
    pinned: frozenset[str]


class Names:
    """The bundles of each served name. Names follow their records independently of each other. Call in one loop."""

    def __init__(
        self,
        bundles: Sequence[LiveBundle],
        metrics: ResidencyMetrics,
        poll_s: float,
        residency: NameResidency | None = None,
    ) -> None:
        """`bundles` must not be empty; the first serves requests without a name."""
        self._bundles = {bundle.name: bundle for bundle in bundles}
        self.first = bundles[0]
        self._is_lazy = residency is not None
        if residency is None:
            table = ResidencyTable(pinned=self._bundles, max_loading=1, tenant_of=tenant_of_name)
        else:
            pinned = {self.first.name, *residency.pinned} & self._bundles.keys()
            table = ResidencyTable(
                residency.budget_bytes, residency.min_stay_s, pinned, max_loading=1, tenant_of=tenant_of_name
            )
        self._source = _BundleSource(self._bundles, is_lazy=self._is_lazy)
        self._residents = Residents(table, self._source, metrics, poll_s, settled=self._settled)
        if residency is not None:
            for bundle in bundles:
                bundle.reserve = lambda size, name=bundle.name: self._residents.resize(name, size)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: dict[str, asyncio.Event] = {}
        self._partial: dict[str, asyncio.Future[Live]] = {}
        self._stand_ins: dict[str, asyncio.Future[Live]] = {}
        self._reading = ThreadPoolExecutor(_NUM_READING, "manifests")
        self._at_hand = ThreadPoolExecutor(1, "manifests-at-hand")
        self._background = ThreadPoolExecutor(_NUM_LEARNING, "manifests-ahead")
        self._learning: asyncio.Task[None] | None = None
        self.has_read_manifests = False
        """Whether the manifests of all names were read once, or could not be read."""

    def find(self, name: str | None, unit_id: str | None, now_ms: float) -> Live:
        """Return the loaded bundle assigned to this user, or visitor session, at this time (Unix ms).

        Starts the load of an absent name. Raises as `of` does, and DependencyUnavailable if no bundle is live.
        """
        bundle = self.of(name)
        self._residents.touch(bundle.name)
        return bundle.of_unit(unit_id, now_ms)

    async def find_soon(self, name: str | None, unit_id: str | None, now_ms: float, timeout_s: float) -> Live:
        """Return the bundle as `find` does within `timeout_s`; if it is not loaded by then, only its popular items.

        If they cannot be read, return the popular items of another name of the tenant.
        """
        with suppress(DependencyUnavailable):
            return self.find(name, unit_id, now_ms)
        bundle = self.of(name)
        if not self._is_lazy:
            return bundle.of_unit(unit_id, now_ms)
        partial = None if bundle.is_known else self._partial_of(bundle)  # a local manifest is read when needed
        await self._wait(bundle.name, _LOAD_SHARE * timeout_s)
        if not bundle.is_loaded:
            partial = partial or self._partial_of(bundle)
            if (live := await _within(_MANIFEST_SHARE * timeout_s, partial)) is not None:
                return live
        if bundle.is_loaded:
            return bundle.of_unit(unit_id, now_ms)
        if (other := self._stand_in(bundle)) is not None:
            live = await _within(timeout_s, self._partial_at_hand(other))  # late only without a processor
            if live is not None:
                return live
        return bundle.of_unit(unit_id, now_ms)  # raises DependencyUnavailable, or was loaded meanwhile

    def current(self, name: str | None) -> Live:
        """Return a name's live bundle; starts the load of an absent name. Raises as `find` does."""
        return self.find(name, None, 0.0)

    def of(self, name: str | None) -> LiveBundle:
        """Return the bundles of a name, or of the first name for None.

        Raises InvalidRequest listing the tenant's served names.
        """
        bundle = self.first if name is None else self._bundles.get(name)
        if bundle is None:
            raise self._unknown(local_name(name or ""), tenant_of_name(name or ""))
        return bundle

    def full_name(self, name: str | None, tenant: str) -> str | None:
        """Return one of a tenant's names as `of` takes it. Raises InvalidRequest for another tenant's name."""
        if name is None:
            return scoped_name(tenant, DEFAULT_NAME) if tenant else None
        full_name = scoped_name(tenant, name)
        if tenant_of_name(full_name) != tenant:
            raise self._unknown(name, tenant)
        return full_name

    @property
    def is_loaded(self) -> bool:
        """Whether at least one name has a live bundle, or bundles are loaded when they are asked for."""
        return self._is_lazy or any(bundle.is_loaded for bundle in self._bundles.values())

    @property
    def loaded(self) -> list[Live]:
        """All bundles that serve now."""
        return [live for bundle in self._residents.models() for live in bundle.loaded]

    def all_loaded_for(self, tenant: str) -> list[Live]:
        """All bundles of this tenant's names that serve now; none if names with a bundle are not loaded."""
        own = [bundle for bundle in self._bundles.values() if tenant_of_name(bundle.name) == tenant]
        if self._is_lazy and not all(bundle.is_loaded for bundle in own):
            return []
        return [live for bundle in own for live in bundle.loaded]

    async def load_each(self, tenant: str, timeout_s: float) -> AsyncIterator[None]:
        """Load the tenant's names that have a bundle and are not loaded; yield after each.

        Raises DependencyUnavailable if they are not loaded within `timeout_s` in all.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + timeout_s
        own = [bundle for bundle in self._bundles.values() if tenant_of_name(bundle.name) == tenant]
        for bundle in [bundle for bundle in own if not bundle.is_loaded]:
            try:
                await loop.run_in_executor(self._reading, bundle.learn)
            except (BundleError, OSError) as error:
                raise bundle.missing() from error
            if bundle.is_known:
                self._residents.touch(bundle.name)
                await self._wait(bundle.name, give_up_s - loop.time())
                if not bundle.is_loaded:
                    raise bundle.missing()
                yield

    def before_swap(self, prepare: Callable[[Live], object]) -> None:
        """Call `prepare` with each bundle; see LiveBundle."""
        for bundle in self._bundles.values():
            bundle.before_swap(prepare)

    def _unknown(self, name: str, tenant: str) -> InvalidRequest:
        own = [local_name(full_name) for full_name in self._bundles if tenant_of_name(full_name) == tenant]
        return InvalidRequest(
            "name", f"unknown name {name!r:.100}", f"this stack serves {', '.join(own[:20]) or 'none yet'}"
        )

    async def start(self) -> None:
        """Load the pinned names one after another, then follow the loaded names in the background."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._residents.start)
        if self._is_lazy:
            self._learning = asyncio.create_task(self._learn())

    async def stop(self) -> None:
        """Stop following; loaded bundles stay."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.wait((self._learning,))
        for pool in (self._reading, self._at_hand, self._background):
            pool.shutdown(wait=False, cancel_futures=True)
        self._source.is_stopped = True
        await asyncio.to_thread(self._residents.stop)

    async def _wait(self, name: str, timeout_s: float) -> None:
        """Wait until a name was loaded or has failed."""
        if self._residents.state(name) not in (Residency.LOADING, Residency.WAITING):
            return
        event = self._awaited.setdefault(name, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    def _settled(self, name: str) -> None:
        """Wake the requests that wait for a name. Called from the loading threads."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, name)

    def _wake(self, name: str) -> None:
        self._partial.pop(name, None)
        if (event := self._awaited.pop(name, None)) is not None:
            event.set()

    def _partial_of(self, bundle: LiveBundle) -> "asyncio.Future[Live] | None":
        """Return the popular items of a bundle, read once for all requests that arrive meanwhile.

        None while too many other bundles are being read.
        """
        future = self._partial.pop(bundle.name, None)
        if future is None or (future.done() and _failed(future)):
            if len(self._partial) >= _MAX_PARTIAL:
                if (name := next((name for name, partial in self._partial.items() if partial.done()), None)) is None:
                    return None
                del self._partial[name]
            future = self._read_partial(bundle)
        self._partial[bundle.name] = future  # last: the first is forgotten first
        return future

    def _read_partial(self, bundle: LiveBundle) -> "asyncio.Future[Live]":
        """Return the popular items: made here if they were read before, since a thread would take more time."""
        loop = asyncio.get_running_loop()
        if (live := bundle.partial_at_once()) is None:
            future = loop.run_in_executor(self._reading, bundle.partial)
            future.add_done_callback(_failed)  # or asyncio logs it
            return future
        done = loop.create_future()
        done.set_result(live)
        return done

    def _partial_at_hand(self, bundle: LiveBundle) -> "asyncio.Future[Live]":
        """Return the popular items of a known bundle, whose files are on this machine: they wait for no other reads."""
        future = self._stand_ins.get(bundle.name)
        is_old = (
            future is not None and future.done() and (_failed(future) or future.result().version != bundle.last_version)
        )
        if future is None or is_old:
            future = asyncio.get_running_loop().run_in_executor(self._at_hand, bundle.partial)
            future.add_done_callback(_failed)  # or asyncio logs it
            self._stand_ins[bundle.name] = future
        return future

    def _stand_in(self, bundle: LiveBundle) -> LiveBundle | None:
        """Return a bundle of the same tenant to show while this bundle cannot be read."""
        tenant = tenant_of_name(bundle.name)
        default = self._bundles.get(scoped_name(tenant, DEFAULT_NAME))
        if default is not None and default.is_known:
            return default
        own = (other for name, other in self._bundles.items() if tenant_of_name(name) == tenant)
        return next((other for other in own if other.is_known), None)

    async def _learn(self) -> None:
        """Read the manifests of all names, a few at a time, default names first."""
        ahead = iter(sorted(self._bundles.values(), key=lambda bundle: local_name(bundle.name) != DEFAULT_NAME))
        num_failed = sum(await asyncio.gather(*(self._learn_some(ahead) for _ in range(_NUM_LEARNING))))
        self.has_read_manifests = True
        log.info("manifests_read", num_names=len(self._bundles), num_failed=num_failed)

    async def _learn_some(self, bundles: Iterator[LiveBundle]) -> int:
        """Read these manifests in turn; return the number of failures."""
        loop, num_failed = asyncio.get_running_loop(), 0
        for bundle in bundles:
            if not bundle.is_loaded:
                try:
                    await loop.run_in_executor(self._background, bundle.learn)
                except (TailraceError, OSError):
                    num_failed += 1
                await asyncio.sleep(_LEARN_PAUSE_S)
        return num_failed


def _failed(done: "asyncio.Future[Live]") -> bool:
    return done.cancelled() or done.exception() is not None


async def _within(timeout_s: float, partial: "asyncio.Future[Live] | None") -> Live | None:
    """Return the popular items of a bundle; None if they were not read in time.

    Raises DependencyUnavailable if there are none.
    """
    with suppress(TimeoutError, BundleError, StoreUnavailable, OSError):
        if partial is not None:
            return await asyncio.wait_for(asyncio.shield(partial), timeout_s)
    return None


class _BundleSource:
    """Loads the bundles of names for `Residents`; `is_lazy`: the files are brought here before the load."""

    def __init__(self, bundles: dict[str, LiveBundle], *, is_lazy: bool) -> None:
        self._bundles = bundles
        self._is_lazy = is_lazy
        self.is_stopped = False

    def fetch(self, name: str) -> ModelBytes:
        """Download the versions that serve under a name. Raises StoreUnavailable, BundleError or OSError."""
        return self._bundles[name].fetch() if self._is_lazy else ModelBytes(0)

    def load(self, name: str) -> LiveBundle:
        """Load the versions that serve under a name."""
        self._bundles[name].poll()
        return self._bundles[name]

    def due(self, models: Mapping[str, LiveBundle]) -> list[str]:
        """Return the names whose records have changed, or with a version to load."""
        return due_names({name: model.follower for name, model in models.items()})

    def refresh(self, name: str, model: LiveBundle) -> None:
        """Follow the name's record."""
        model.poll()

    def is_broken(self, model: LiveBundle) -> bool:
        """Whether a version of the name could not be loaded."""
        return model.is_broken

    def unload(self, name: str, model: LiveBundle) -> None:
        """Unload the versions of a name; at the end of the process they stay."""
        if not self.is_stopped:
            model.unload()
