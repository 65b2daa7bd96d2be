"""The last tier: what is popular, in this process. No network on the request path, and it cannot fail.

The bundle's popularity is the prior; the stream worker's recent windows are fetched in the background and added. Both are
shares of their own total, so that a quiet hour does not erase the prior. When the windows cannot be read, the last known
ones stay.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog

from models.catalogue import Catalogue
from services.gateway.request.repeating import Repeating
from services.gateway.tiers.live_bundle import LiveBundle

log = structlog.get_logger()

_READ_TIMEOUT_S = 1.0


class PopularityWindows(Protocol):
    """Recent popularity, kept by the stream worker."""

    async def read_popular(self, timeout_s: float) -> Sequence[tuple[str, float]]:
        """Give (item id, weight), for example events per hour; empty before the first events. Raises DependencyAway."""
        ...


@dataclass(frozen=True, slots=True)
class PopularRanking:
    """All items of one bundle, most popular first: indices (num_items,) and their scores, in that order."""

    version: str
    order: np.ndarray
    scores: np.ndarray


class Popular:
    """Owns the ranking and the task that refreshes it."""

    def __init__(self, live: LiveBundle, windows: PopularityWindows, refresh_s: float) -> None:
        self._live = live
        self._windows = windows
        self._recent: Sequence[tuple[str, float]] = ()
        self._ranking: PopularRanking | None = None
        self._refreshing = Repeating(self.refresh, refresh_s, at_once=True)
        self._one_at_a_time = asyncio.Lock()

    def ranking(self, version: str, catalogue: Catalogue) -> PopularRanking:
        """Return the ranking for this bundle: the refreshed one, or one made on the spot after a swap."""
        if self._ranking is None or self._ranking.version != version:
            self._ranking = rank_by_popularity(version, catalogue, self._recent)
        return self._ranking

    async def start(self) -> None:
        """Refresh in the background from now on."""
        self._refreshing.start()

    async def stop(self) -> None:
        """Stop refreshing; the last ranking stays."""
        await self._refreshing.stop()

    async def refresh(self) -> None:
        """Read the windows and rank anew. Keeps the last ranking when they cannot be read.

        One at a time: an older reading, slow in its thread, would otherwise overwrite a newer one's ranking.
        """
        async with self._one_at_a_time:
            await self._read_and_rank()

    async def _read_and_rank(self) -> None:
        try:
            self._recent = await self._windows.read_popular(_READ_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever the store fails at, the last windows stay
            log.warning("popularity_not_refreshed", error=repr(error))
            return
        if self._live.is_loaded:
            live = self._live.current()
            self._ranking = await asyncio.to_thread(rank_by_popularity, live.version, live.catalogue, self._recent)


def rank_by_popularity(version: str, catalogue: Catalogue, recent: Sequence[tuple[str, float]]) -> PopularRanking:
    """Rank every item by its share of the prior plus its share of the recent windows; ties by index."""
    windows = np.zeros(len(catalogue.item_ids))
    for item_id, weight in recent:
        index = catalogue.index_of.get(item_id)
        if index is not None:
            windows[index] = max(0.0, weight)
    scores = _shares(catalogue.popularity) + _shares(windows)
    order = np.argsort(-scores, kind="stable")
    return PopularRanking(version, order, scores[order])


def _shares(weights: np.ndarray) -> np.ndarray:
    total = float(weights.sum())
    return weights / total if total > 0 else np.zeros(len(weights))
