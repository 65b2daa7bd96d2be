"""Searches the titles of the live catalogue, in one thread. New and changed titles are found within a second."""

import asyncio
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.errors import DeadlineExceeded
from services.gateway.overload.long_work import LongWork
from services.gateway.request.live_bundle import ByTexts, Live
from services.gateway.request.names import Names
from services.gateway.wishes.titles import TitleIndex
from services.items.layout import ItemLayout

log = structlog.get_logger()

_NO_TITLES = TitleIndex(())


@dataclass(frozen=True, slots=True)
class _Indexed:
    """The titles of a bundle's items, and the titles new or changed as of a revision of words, by item index."""

    known: TitleIndex
    num_items: int
    indices: tuple[int, ...] = ()
    changed: TitleIndex = _NO_TITLES
    revision: tuple[int, int] = (0, 0)


class TitleSearch:
    """Title indexes of all loaded bundles. One per process; call from the event loop."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._indexed: WeakKeyDictionary[Live, _Indexed] = WeakKeyDictionary()
        self._known = ByTexts(lambda texts: TitleIndex(texts.titles))
        self._searching = LongWork("search")
        names.before_swap(self._index)

    async def matches(self, query: str, live: Live, timeout_s: float) -> np.ndarray | None:
        """Return how well each title matches (n,), by item index; None if not searched in time. Never raises."""
        try:
            return await self._searching.run(timeout_s, self._matches, query, live)
        except DeadlineExceeded:
            return None
        except Exception as error:  # noqa: BLE001 - the list is then ordered without titles
            log.warning("titles_not_searched", version=live.version, error=type(error).__name__)
            return None

    def _matches(self, query: str, live: Live) -> np.ndarray:
        indexed = self._indexed.get(live) or self._index(live)
        matches_V = np.zeros(indexed.num_items, dtype=np.float32)
        known_V = indexed.known.matches(query)
        matches_V[: len(known_V)] = known_V
        matches_V[list(indexed.indices)] = indexed.changed.matches(query)
        return matches_V

    def _index(self, live: Live) -> _Indexed:
        indexed = self._indexed[live] = _Indexed(self._known.of(live.catalogue.texts), len(live.catalogue.titles))
        return indexed

    async def refresh(self) -> None:
        """Index the titles that are new or have changed."""
        for live in self._names.loaded:
            indexed, revision = self._indexed.get(live), live.items.text_revision
            if indexed is not None and indexed.revision != revision:
                self._indexed[live] = await asyncio.to_thread(_with_changes, indexed.known, live.items, revision)


def _with_changes(known: TitleIndex, items: ItemLayout, revision: tuple[int, int]) -> _Indexed:
    num_items = items.num_named
    indices = (*items.reworded(), *range(items.num_known, num_items))
    return _Indexed(known, num_items, indices, TitleIndex([items.title(index) for index in indices]), revision)
