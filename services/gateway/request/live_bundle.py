"""The live bundle of the gateway: loaded off the event loop, swapped in whole, replaced when the pointer moves.

A bundle that does not load leaves the old one in place and is logged once. It does not know how a student is read from a
bundle: that function is a parameter.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog
from prometheus_client import Gauge

from models.bundle import Bundle, learned_repeats, lists_version, llm_pays
from models.bundle_follower import BundleFollower
from models.catalogue import Catalogue
from models.registry import BundleStore
from models.similar import SimilarTable
from services.errors import DependencyUnavailable
from services.items.expression import Expressions
from services.items.layout import ItemLayout
from services.items.live_items import LiveItems

log = structlog.get_logger()


class Student(Protocol):
    """The small model in this process."""

    def rank(self, history: Sequence[int], allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most k allowed item indices, best first, and their scores.

        `history` holds item indices, oldest first, at least one; `allowed` is (num_items,) bool. Blocks for about a
        millisecond.
        """
        ...

    def vectors(self, items: np.ndarray) -> np.ndarray | None:
        """Return the unit vectors (n, D) of these items (n,) by index, likes pointing alike; None where this student has none."""
        ...


@dataclass(frozen=True, slots=True)
class Live:
    """One loaded bundle: everything that a request needs from it. One that was made of items alone has no student."""

    version: str
    catalogue: Catalogue
    student: Student | None
    manifest: dict[str, Any]
    items: ItemLayout
    expressions: Expressions
    similar: SimilarTable

    @property
    def repeats(self) -> bool:
        """Whether requests show seen items by default, and stored lists hold them."""
        return learned_repeats(self.manifest)

    @property
    def lists_version(self) -> str:
        """The version under whose name the store has this bundle's lists."""
        return lists_version(self.manifest, self.version)

    def vectors(self, items: np.ndarray) -> np.ndarray | None:
        """Return the unit vectors (n, D) of these items (n,) by index, zeros for those that the bundle lacks; None where its student has none, or it has no student."""
        if self.student is None:
            return None
        is_known = items < self.items.num_known
        found = self.student.vectors(np.where(is_known, items, 0))
        return found if found is None or is_known.all() else found * is_known[:, None]

    def llm_pays(self, num_history: int) -> bool:
        """Whether the bundle's evaluation shows a gain of the LLM for histories of this many known items, or has not looked."""
        return llm_pays(self.manifest, num_history)


class LiveBundle:
    """Owns the loaded bundle and the follower of the pointer."""

    def __init__(
        self,
        store: BundleStore,
        load_student: Callable[[Bundle, Catalogue], Student],
        poll_s: float,
        info: Gauge,
        quality: Gauge,
        lost: Gauge,
        items: LiveItems | None = None,
    ) -> None:
        """`items` is the live catalogue; without one there is what bundles have."""
        self._load_student = load_student
        self._poll_s = poll_s
        self._info = info
        self._quality = quality
        self.catalogue_state = items or LiveItems()
        self._live: Live | None = None
        self._prepare: list[Callable[[Live], object]] = []
        self._follower = BundleFollower(store, poll_s, self._load, self._swap, polled=lambda: lost.set(store.is_lost))

    @property
    def is_loaded(self) -> bool:
        """Whether a bundle is loaded."""
        return self._live is not None

    def current(self) -> Live:
        """Return the live bundle. Raises DependencyUnavailable before the first one is loaded."""
        if self._live is None:
            raise DependencyUnavailable("bundle", retry_after_s=max(1.0, self._poll_s))
        return self._live

    def before_swap(self, prepare: Callable[[Live], object]) -> None:
        """Call `prepare` with each bundle that is loaded from now on, in the loading thread, before any request sees it. A bundle with which it fails is refused."""
        self._prepare.append(prepare)

    async def start(self) -> None:
        """Load the bundle that the pointer names, if there is one, then follow the pointer in the background."""
        await asyncio.to_thread(self._follower.start)

    async def stop(self) -> None:
        """Stop following; the loaded bundle stays."""
        self._follower.stop()

    async def refresh(self) -> None:
        """Load the version that the pointer names, unless it is the loaded or the last refused one."""
        await asyncio.to_thread(self._follower.refresh)

    def _load(self, bundle: Bundle) -> Live:
        catalogue = bundle.catalogue()
        student = self._load_student(bundle, catalogue) if bundle.is_trained else None
        items, similar = self.catalogue_state.lay(catalogue), bundle.similar(len(catalogue.item_ids))
        live = Live(bundle.version, catalogue, student, bundle.manifest, items, Expressions(items), similar)
        _warm(live)
        for prepare in self._prepare:
            prepare(live)
        return live

    def _swap(self, live: Live) -> None:
        for model, figures in live.manifest.get("metrics", {}).items():
            for metric, value in figures.items():
                self._quality.labels(live.version, model, metric).set(value)
        if self._live is not None:
            self._info.labels(self._live.version).set(0)
        self._info.labels(live.version).set(1)
        self._live = live
        log.info("bundle_live", version=live.version, num_items=len(live.catalogue.item_ids))


def _warm(live: Live) -> None:
    """Fill lazy tables and run the student once, before the first request."""
    num_items = len(live.catalogue.item_ids)
    live.catalogue.index_of  # noqa: B018 - fills the cached property
    for known in (live.catalogue, live.items):
        known.allowed(categories=("",))  # fills the table of categories: 0.5 s at 10^6 items
    if live.student is not None:
        live.student.rank([0], np.ones(num_items, dtype=bool), min(10, num_items))
