"""The bundles that a gateway serves under one name: the live one and, during a release, the canary.

Bundles load off the event loop and are swapped in whole; a bundle that fails to load leaves the current ones in place.
The function that reads a student from a bundle is a parameter.
"""

import asyncio
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import structlog
from pyarrow import parquet
from pyarrow.lib import ArrowInvalid

from models.catalogue import Catalogue, ItemTexts
from models.mixer import Added, Mixer
from models.prompt import Prompt, prompt_of
from models.registry.bundle import CATALOGUE, Bundle, learned_repeats, lists_version, llm_pays
from models.registry.bundle_follower import BundleFollower, Serving
from models.registry.canary import Canary
from models.registry.manifest import MANIFEST
from models.registry.popular import pack, served, unpack
from models.registry.store import BundleStore
from models.search import OWN_SEARCH, Search, search_of
from models.similar import SimilarTable, empty_table
from models.wishes.reading import Reading
from models.wishes.vocabulary import WishItem
from services.contracts.experiments import place_of
from services.contracts.tenant import local_name, tenant_of_name
from services.errors import BundleIncomplete, DependencyUnavailable, EnvironmentFault
from services.items.expression import Expressions
from services.items.layout import ItemLayout
from services.items.live_items import Knowledge, LiveItems
from services.observability.metrics import GatewayMetrics
from services.residency.state import ModelBytes

log = structlog.get_logger()

_BUNDLE_BYTES, _ITEM_BYTES, _CATALOGUE_ITEM_BYTES = 2 * 2**20, 300, 1_200
"""Memory of a loaded bundle apart from its files: in all, by item for states and masks, and by item for ids, texts,
index and marks, which bundles with equal catalogues share."""
_MAX_POPULAR_BYTES = 2**15
"""Packed popular items are kept for each name up to this size; a hundred usual items take 6 kB."""
_NOT_LOADED = ("decoder/", "teacher/", "judged/", "report.")
_UNLOAD_S, _LOOK_S = 10.0, 0.002

T = TypeVar("T")


class Student(Protocol):
    """The distilled model in this process."""

    def rank(
        self, history: Sequence[int], allowed: np.ndarray, k: int, added: Added | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return at most k allowed item indices, best first, and their scores, mixed with scores that sources `added`.

        `history` holds at least one item index, oldest first; `allowed` is (num_items,) bool. Blocks for about a
        millisecond.
        """
        ...

    def vectors(self, items: np.ndarray) -> np.ndarray | None:
        """Return the unit vectors (n, D) of these item indices (n,); similar items point alike.

        Returns None if this student has none.
        """
        ...


class WishReader(Protocol):
    """The reader of wishes of one bundle. Its methods block; separate threads may call them."""

    def read(self, text: str, session_wishes: Sequence[str] = ()) -> Reading:
        """Read a wish after earlier wishes of the same conversation, oldest first."""
        ...

    def with_items(self, items: Sequence[WishItem]) -> "WishReader":
        """Return a reader that knows these items too, after its items in this order; a known item's words change."""
        ...


class ByTexts(Generic[T]):
    """A value made of a catalogue's texts, once for all bundles that share them, kept while any of them is loaded."""

    def __init__(self, make: Callable[[ItemTexts], T]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[ItemTexts, T] = weakref.WeakKeyDictionary()

    def of(self, texts: ItemTexts) -> T:
        """Return the value of these texts."""
        made = self._made.get(texts)
        if made is None:
            made = self._made[texts] = self._make(texts)
        return made


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Live:
    """A bundle loaded to serve under a name, with everything a request needs from it.

    `student` is None for an untrained bundle. Caches derived from it are keyed by this object: a version may be loaded
    under several names, with separate item layouts. `reader` is None for a bundle that reads no wishes. `is_partial`:
    the bundle is not loaded yet, and `catalogue` holds only its popular items.
    """

    name: str
    version: str
    catalogue: Catalogue
    student: Student | None
    manifest: dict[str, Any]
    items: ItemLayout
    expressions: Expressions
    similar: SimilarTable
    mixer: Mixer | None = None
    reader: WishReader | None = None
    is_partial: bool = False
    prompt: Prompt = field(default_factory=Prompt)
    search: Search = OWN_SEARCH

    @property
    def tenant(self) -> str:
        return tenant_of_name(self.name)

    @property
    def repeats(self) -> bool:
        """Whether requests show seen items by default, and stored lists contain them."""
        return learned_repeats(self.manifest)

    @property
    def lists_version(self) -> str:
        """The version under which the store keeps this bundle's lists."""
        return lists_version(self.manifest, self.version)

    def vectors(self, items: np.ndarray) -> np.ndarray | None:
        """Return the unit vectors (n, D) of these item indices (n,), zeros for items missing from the bundle.

        Returns None without a student or without its vectors.
        """
        if self.student is None:
            return None
        num_known, num_named = self.items.num_known, self.items.num_named
        if num_known == num_named or items.max(initial=0) < num_known:
            return self.student.vectors(items)
        is_known = items < num_known
        vectors = self.student.vectors(np.where(is_known, items, 0))
        return vectors if vectors is None else vectors * is_known[:, None]

    def added(self, model: str, history: Sequence[int]) -> Added | None:
        """Return the scores that the sources add to this model's for a history; None for a model without sources."""
        return None if self.mixer is None else self.mixer.added(model, history)

    def llm_pays(self, num_history: int) -> bool:
        """Whether the evaluation shows an LLM gain for histories of this many known items.

        Also true if the bundle was not evaluated.
        """
        return llm_pays(self.manifest, num_history)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A version whose files were on this machine: its memory when loaded, its folder, and its files' names."""

    size: ModelBytes
    folder: str
    names: tuple[str, ...]

    @property
    def paths(self) -> Iterator[str]:
        return (f"{self.folder}/{name}" for name in self.names)


class LiveBundle:
    """Owns the loaded bundles of one name, and the follower of its record."""

    def __init__(
        self,
        store: BundleStore,
        load_student: Callable[[Bundle, Catalogue], Student],
        poll_s: float,
        metrics: GatewayMetrics,
        items: LiveItems | None = None,
        load_reader: Callable[[Bundle, Catalogue], WishReader | None] = lambda _bundle, _catalogue: None,
    ) -> None:
        """`items` is the live catalogue; None uses only the bundles' items."""
        self._load_reader = load_reader
        self.name = store.name
        self._load_student = load_student
        self._poll_s = poll_s
        self._metrics = metrics
        self._catalogue_state = items or LiveItems()
        self._serving: Serving[Live] = Serving()
        self._prepare: list[Callable[[Live], object]] = []
        self._store = store
        self._bytes_by_version: dict[str, ModelBytes] = {}
        self._fetched: dict[str, _Fetched] = {}
        self._last_version: str | None = None
        self._popular: tuple[str, bytes] | None = None
        self.reserve: Callable[[ModelBytes], bool] | None = None
        """Counts the memory of all versions of the name; returns whether it fits. None where it is not counted."""
        self.follower = self._follow()

    @property
    def is_loaded(self) -> bool:
        return self._serving.live is not None

    @property
    def last_version(self) -> str | None:
        """The version whose popular items `partial` returns; None before one was read to this machine."""
        return self._last_version

    @property
    def is_known(self) -> bool:
        """Whether the popular items of a version were read to this machine."""
        return self._last_version is not None

    @property
    def is_broken(self) -> bool:
        """Whether a version that serves under the name could not be loaded at the last attempt."""
        return bool(self.follower.failed)

    @property
    def canary(self) -> Canary | None:
        """The release in progress, if its candidate is loaded."""
        return self._serving.canary

    @property
    def loaded(self) -> tuple[Live, ...]:
        return tuple(self._serving.loaded.values())

    def current(self) -> Live:
        """Return the live bundle.

        Raises DependencyUnavailable before it is loaded, and while the item states are unknown.
        """
        return self._live_of(self._serving)

    def of_unit(self, unit_id: str | None, now_ms: float) -> Live:
        """Return the bundle for this user, or visitor session, at this time (Unix ms).

        The canary answers its traffic fraction; the live bundle answers everyone else and None. Raises
        DependencyUnavailable before the first live bundle is loaded.
        """
        serving = self._serving
        canary = serving.canary if self._catalogue_state.knowledge is not Knowledge.NONE else None
        if canary is not None and unit_id is not None and canary.takes(place_of(canary.salt, unit_id), now_ms):
            return serving.loaded[canary.version]
        return self._live_of(serving)

    def beside(self, live: Live) -> Live | None:
        """Return the loaded candidate of the release in progress, unless it is this bundle."""
        serving = self._serving
        candidate = None if serving.canary is None else serving.loaded[serving.canary.version]
        return None if candidate is live else candidate

    def before_swap(self, prepare: Callable[[Live], object]) -> None:
        """Call `prepare` with each bundle loaded from now on, in the loading thread, before any request uses it.

        A bundle is rejected if `prepare` raises.
        """
        self._prepare.append(prepare)

    async def refresh(self) -> None:
        """Poll the name now, and load its new versions except recently rejected ones."""
        await asyncio.to_thread(self.poll)

    def poll(self) -> None:
        """Refresh in this thread. Never raises."""
        self.follower.refresh()
        self._metrics.name_record_corrupt.labels(self.name).set(self.follower.is_record_corrupt)

    def fetch(self) -> ModelBytes:
        """Bring the files of the serving versions to this machine, and return the memory that they will take.

        Raises StoreUnavailable, BundleError or OSError.
        """
        serving = self._store.record().serving
        self._fetched = {version: self._at_hand(version) or _fetched(self._store.open(version)) for version in serving}
        self._bytes_by_version |= {version: fetched.size for version, fetched in self._fetched.items()}
        return ModelBytes.sum(fetched.size for fetched in self._fetched.values())

    def _at_hand(self, version: str) -> "_Fetched | None":
        """Return a version that was fetched last time, if all its files are still on this machine."""
        fetched = self._fetched.get(version)
        return fetched if fetched is not None and all(map(os.path.exists, fetched.paths)) else None

    def unload(self) -> None:
        """Unload all versions, and wait until no request uses them."""
        lives = [weakref.ref(live) for live in self.loaded]
        self.follower = self._follow()
        self._swap(Serving())
        self._bytes_by_version.clear()
        give_up_s = time.monotonic() + _UNLOAD_S
        while any(live() is not None for live in lives) and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)

    def learn(self) -> None:
        """Read the name's record and its live version's popular items, for `partial`. Raises as `fetch` does."""
        version = self._store.record().live
        if version is not None:
            self._read_popular(version)
        self._last_version = version

    def _read_popular(self, version: str) -> bytes | None:
        """Return the packed popular items of a version, and keep them. Raises as `fetch` does."""
        popular = self._popular
        if popular is not None and popular[0] == version:
            return popular[1]
        packed = pack(self._store.described(version).manifest)
        self._popular = None if packed is None or len(packed) > _MAX_POPULAR_BYTES else (version, packed)
        return packed

    def partial(self) -> Live:
        """Return the popular items of the last known live version as a bundle without models.

        Blocks while it reads, unless `learn` has read them.

        Raises DependencyUnavailable if no bundle is promoted, or the item states are unknown; as `fetch` does if they
        cannot be read.
        """
        self._check_items()
        if self._last_version is None:
            self.learn()
        if (version := self._last_version) is None:
            raise self.missing()
        if (packed := self._read_popular(version)) is None:
            raise BundleIncomplete(f"{version}: the manifest lists no popular items; publish it again")
        manifest, catalogue = unpack(packed)
        return self._partial(version, manifest, catalogue, self._catalogue_state.lay_closed(catalogue))

    def partial_at_once(self) -> Live | None:
        """Return the same within a part of a millisecond; None if that needs a read or another thread."""
        popular = self._popular
        if popular is None or popular[0] != self._last_version or self._catalogue_state.knowledge is Knowledge.NONE:
            return None
        manifest, catalogue = unpack(popular[1])
        items = self._catalogue_state.lay_at_once(catalogue)
        return None if items is None else self._partial(popular[0], manifest, catalogue, items)

    def _partial(self, version: str, manifest: dict[str, Any], catalogue: Catalogue, items: ItemLayout) -> Live:
        return Live(
            name=self.name,
            version=version,
            catalogue=catalogue,
            student=None,
            manifest=manifest,
            items=items,
            expressions=Expressions(items, lock=threading.Lock()),
            similar=empty_table(len(catalogue.item_ids)),
            is_partial=True,
        )

    def _live_of(self, serving: Serving[Live]) -> Live:
        self._check_items()
        if serving.live is None:
            raise self.missing()
        return serving.loaded[serving.live]

    def _check_items(self) -> None:
        if self._catalogue_state.knowledge is Knowledge.NONE:  # otherwise hidden items would be shown
            raise DependencyUnavailable("states of items", retry_after_s=1.0)

    def missing(self) -> DependencyUnavailable:
        """Return the error for a name whose bundle is not loaded."""
        return DependencyUnavailable(f"bundle of {local_name(self.name)}", retry_after_s=max(1.0, self._poll_s))

    def _follow(self) -> BundleFollower[Live]:
        return BundleFollower(self._store, self._load, self._swap)

    def _load(self, bundle: Bundle) -> Live:
        if self.reserve is None:
            return self._read(bundle)
        if bundle.version not in self._bytes_by_version:
            self._bytes_by_version[bundle.version] = memory_of(bundle)
        if not self.reserve(self._bytes_of({*self._serving.loaded, bundle.version})):
            raise EnvironmentFault(f"TAILRACE_STUDENT_MEMORY_GIB: no room for {bundle.version} yet")
        try:
            return self._read(bundle)
        except BaseException:
            self.reserve(self._bytes_of(self._serving.loaded))
            raise

    def _bytes_of(self, versions: Iterable[str]) -> ModelBytes:
        return ModelBytes.sum(self._bytes_by_version[version] for version in versions)

    def _read(self, bundle: Bundle) -> Live:
        catalogue = bundle.catalogue()
        student = self._load_student(bundle, catalogue) if bundle.is_trained else None
        items, similar = self._catalogue_state.lay(catalogue), bundle.similar(len(catalogue.item_ids))
        expressions = Expressions(items, lock=threading.Lock())
        mixer = bundle.mixer(catalogue) if bundle.is_trained else None
        live = Live(
            name=self.name,
            version=bundle.version,
            catalogue=catalogue,
            student=student,
            manifest=served(bundle.manifest),
            items=items,
            expressions=expressions,
            similar=similar,
            mixer=mixer,
            reader=self._load_reader(bundle, catalogue),
            prompt=prompt_of(bundle.manifest),
            search=search_of(bundle.manifest),
        )
        _warm(live)
        for prepare in self._prepare:
            prepare(live)
        for model, figures in live.manifest.get("metrics", {}).items():
            for metric, value in figures.items():
                self._metrics.bundle_quality.labels(live.version, model, metric).set(value)
        return live

    def _swap(self, serving: Serving[Live]) -> None:
        before, self._serving = self._serving, serving
        self._last_version = serving.live or before.live or self._last_version
        if self.reserve is not None and serving.loaded and before.loaded.keys() - serving.loaded.keys():
            self._bytes_by_version = {version: self._bytes_by_version[version] for version in serving.loaded}
            self.reserve(ModelBytes.sum(self._bytes_by_version.values()))
        for roles, value in ((_roles(before), 0), (_roles(serving), 1)):
            for role, version in roles:
                self._metrics.bundle_info.labels(version, self.name, role).set(value)
        if _roles(before) != _roles(serving):
            log.info("bundles_serving", name=self.name, **dict(_roles(serving)))


def _roles(serving: Serving[Live]) -> list[tuple[str, str]]:
    """Return the role (live or canary) and version of each serving bundle."""
    canary = None if serving.canary is None else serving.canary.version
    return [(role, version) for role, version in (("live", serving.live), ("canary", canary)) if version is not None]


def _fetched(bundle: Bundle) -> _Fetched:
    names = (MANIFEST, *bundle.manifest["files"])
    return _Fetched(memory_of(bundle), str(bundle.path), tuple(map(sys.intern, names)))


def memory_of(bundle: Bundle) -> ModelBytes:
    """Return the memory that a bundle takes in a gateway, without its decoder. Reads sizes of files only."""
    files = (bundle.path / name for name in bundle.manifest["files"] if not name.startswith(_NOT_LOADED))
    try:
        num_rows: int = parquet.read_metadata(bundle.path / CATALOGUE).num_rows
        file_bytes = sum(path.stat().st_size for path in files)
    except (OSError, ArrowInvalid) as error:
        raise BundleIncomplete(f"{bundle.path}: catalogue.parquet is not readable ({error})") from error
    catalogue = bundle.manifest["files"].get(CATALOGUE, bundle.version)
    return ModelBytes(
        _BUNDLE_BYTES + num_rows * _ITEM_BYTES + file_bytes, {catalogue: num_rows * _CATALOGUE_ITEM_BYTES}
    )


def _warm(live: Live) -> None:
    """Fill lazy tables and run the student once, before the first request."""
    num_items = len(live.catalogue.item_ids)
    live.catalogue.index_of  # noqa: B018 - fills the cached property
    for known in (live.catalogue, live.items):
        known.allowed(categories=("",))  # fills the table of categories: 0.5 s at 10^6 items
    for column in live.items.columns.texts.values():
        column.codes_with("")  # fills the index of its texts
    if live.student is not None:
        live.student.rank([0], np.ones(num_items, dtype=bool), min(10, num_items))
