"""Searches the titles of the live catalogue, in one thread. Items that the bundle lacks are found within a second."""

import asyncio
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.errors import DeadlineExceeded
from services.gateway.overload.long_work import LongWork
from services.gateway.request.live_bundle import Live
from services.gateway.request.names import Names
from services.gateway.wishes.titles import TitleIndex

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Indexed:
    """The titles of a bundle's items, and of the new items as of a revision of words."""

    known: TitleIndex
    new: TitleIndex
    revision: int = 0


class TitleSearch:
    """Title indexes of all loaded bundles. One per process; call from the event loop."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._indexed: WeakKeyDictionary[Live, _Indexed] = WeakKeyDictionary()
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
        found = self._indexed.get(live) or self._index(live)
        return np.concatenate([found.known.matches(query), found.new.matches(query)])

    def _index(self, live: Live) -> _Indexed:
        known = TitleIndex(live.catalogue.titles)
        found = self._indexed[live] = _Indexed(known, TitleIndex(()))
        return found

    async def refresh(self) -> None:
        """Index the items that are new, or whose words have changed."""
        for live in self._names.loaded:
            found, revision = self._indexed.get(live), live.items.words_revision
            if found is not None and found.revision != revision:
                items = live.items
                titles = [items.title(index) for index in range(items.num_known, items.num_named)]
                new = await asyncio.to_thread(TitleIndex, titles)
                self._indexed[live] = _Indexed(found.known, new, revision)
