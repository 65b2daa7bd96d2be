"""The popular tier: recent popularity, in this process. Makes no network calls on the request path and cannot fail.

The bundle's popularity is the prior that smooths the stream worker's recent windows, so that a quiet hour does not
erase the prior and one fresh event does not lead the list. If the windows, read in the background, cannot be read, the
last ones stay.

All items of each serving bundle are ranked off the event loop, after each read and when the bundle loads: 0.1 s for a
million items. Items that only the live catalogue has are ranked without training events: by recent use, then newest
first.

A shed request gets the head of its bundle's ranking, formatted once for all callers. This costs a fraction of the path
through history, masks and policy and returns the same items.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from services.contracts.features import RecentPopularity
from services.contracts.recommend import Filters, PopularIn, RecommendRequest, ScoredItem, Tier
from services.errors import DependencyUnavailable
from services.gateway.periodic_task import PeriodicTask
from services.gateway.ranking import ItemRanking, as_chosen, as_items, best_allowed
from services.gateway.request.context import RequestContext
from services.gateway.request.live_bundle import Live
from services.gateway.request.names import Names
from services.gateway.tiers.tier import TierResult
from services.items.layout import ItemLayout

log = structlog.get_logger()

_READ_TIMEOUT_S = 1.0
_NO_FILTERS = Filters()
_NO_EVENTS = RecentPopularity()
_PRIOR_EVENTS = 50.0
"""The most used item's training events weigh at most as much as this many users of the last hour."""


class PopularityWindows(Protocol):
    """Recent popularity, maintained by the stream worker."""

    async def read_popular(self, timeout_s: float) -> RecentPopularity:
        """Return the windows; empty before the first events. Raises DependencyUnavailable."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PopularRanking:
    """All items of one bundle, most popular first: indices (num_items,) and their scores, in that order."""

    version: str
    order: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True, slots=True)
class _Head:
    """The first available items of a ranking, formatted at a revision of the items."""

    ranking: PopularRanking
    revision: int
    items: tuple[ScoredItem, ...]


class PopularTier:
    """Owns the rankings and their formatted heads, each kept while its bundle is in use, and their refresh task."""

    tier = Tier.POPULAR

    def __init__(self, names: Names, windows: PopularityWindows, refresh_s: float) -> None:
        self._names = names
        self._windows = windows
        self._recent: Mapping[str, RecentPopularity] = {}
        """By tenant."""
        self._rankings: WeakKeyDictionary[Live, PopularRanking] = WeakKeyDictionary()
        self._heads: WeakKeyDictionary[Live, _Head] = WeakKeyDictionary()
        self._refreshing = PeriodicTask("popularity", self.refresh, refresh_s, at_once=True)
        self._refresh_lock = asyncio.Lock()
        names.before_swap(self._rank)

    def facts(self, context: RequestContext, budget_s: float) -> Mapping[str, object]:
        """Return no facts: this tier can always answer."""
        return {}

    def rank(self, context: RequestContext) -> TierResult:
        """Return the most popular allowed items, enough to complete the items of other tiers.

        If the request names a window, its items come first, scored by their users in it; the remaining items follow
        with score 0.
        """
        popular, showable = self.ranking(context.live), context.masks.showable
        indices, scores = best_allowed(
            popular.order, popular.scores, showable, max(2 * context.num_wanted, context.num_candidates)
        )
        subject = context.request.subject
        if isinstance(subject, PopularIn) and subject.window is not None:
            counted = (
                (context.live.items.index(item_id), count)
                for item_id, count in self._recent_of(context.live).windows.get(subject.window, ())
            )
            counts = {index: float(count) for index, count in counted if index is not None and index < len(showable)}
            others = {index: 0.0 for index in indices.tolist() if index not in counts}
            return TierResult(ranking=ItemRanking.in_order(Tier.POPULAR, counts | others))
        return TierResult(ranking=ItemRanking(Tier.POPULAR, indices, scores))

    def items_from_memory(self, request: RecommendRequest, live: Live) -> tuple[ScoredItem, ...] | None:
        """Return the k most popular available items.

        Returns None if filters, rules, a subject or a small catalogue require the masks.
        """
        unwanted = {*request.excluded_item_ids, *(request.recent_item_ids if request.exclude_seen else ())}
        k = request.num_items
        num_needed = k + len(unwanted)
        if request.filters != _NO_FILTERS or request.rules.reorder or request.subject not in (None, PopularIn()):
            return None
        head = self._first(num_needed, live)
        if len(head) < num_needed:
            return None
        if not unwanted:
            return head[:k]
        return tuple(item for item in head[:num_needed] if item.item_id not in unwanted)[:k]

    def _first(self, num_items: int, live: Live) -> tuple[ScoredItem, ...]:
        """Return at least this many of the most popular available items, if they exist.

        Formats the items again after an item was hidden or shown.
        """
        ranking, items, head = self.ranking(live), live.items, self._heads.get(live)
        if head is None or (head.ranking, head.revision) != (ranking, items.revision) or len(head.items) < num_items:
            revision = items.revision
            first = best_allowed(ranking.order, ranking.scores, items.columns.available, num_items)
            shown = as_items(as_chosen([ItemRanking(Tier.POPULAR, *first)]), items)
            head = self._heads[live] = _Head(ranking, revision, shown)
        return head.items

    def ranking(self, live: Live) -> PopularRanking:
        """Return the last ranking of this bundle, with newer items appended."""
        ranking = self._rankings.get(live) or self._rank(live)
        if len(ranking.order) < (num_named := live.items.num_named):
            ranking = self._rankings[live] = with_newest(ranking, live.items, num_named)
        return ranking

    def _rank(self, live: Live) -> PopularRanking:
        """Rank this bundle's items by the last windows and keep the result. Called from several threads."""
        ranking = self._rankings[live] = rank_by_popularity(live.version, live.items, self._recent_of(live).weights)
        return ranking

    def _recent_of(self, live: Live) -> RecentPopularity:
        return self._recent.get(live.tenant, _NO_EVENTS)

    async def start(self) -> None:
        self._refreshing.start()

    async def stop(self) -> None:
        """Stop refreshing; the last ranking stays."""
        await self._refreshing.stop()

    async def refresh(self) -> None:
        """Read the windows and rank again. Keeps the last ranking if they cannot be read.

        Serialized: an older read, slow in its thread, would otherwise overwrite a newer ranking.
        """
        async with self._refresh_lock:
            await self._read_and_rank()

    async def _read_and_rank(self) -> None:
        try:
            recent = await self._windows.read_popular(_READ_TIMEOUT_S)
        except DependencyUnavailable as error:
            log.warning("popularity_not_refreshed", error=repr(error))
            return
        loaded = self._names.loaded
        self._recent = {tenant: recent.of(tenant) for tenant in {live.tenant for live in loaded}}
        for live in loaded:
            await asyncio.to_thread(self._rank, live)


def with_newest(ranking: PopularRanking, items: ItemLayout, num_named: int) -> PopularRanking:
    """Return the ranking with missing items appended, newest first: they have no events yet."""
    newest, published = np.arange(len(ranking.order), num_named), items.columns.numbers.get("published_ms")
    if published is not None:
        newest = newest[np.argsort(-np.nan_to_num(published.numbers[newest]), kind="stable")]
    scores = np.concatenate((ranking.scores, np.zeros(len(newest))))
    return PopularRanking(ranking.version, np.concatenate((ranking.order, newest)), scores)


def rank_by_popularity(version: str, items: ItemLayout, recent: Sequence[tuple[str, float]]) -> PopularRanking:
    """Rank every item by its normalized pseudo-counts plus recent weights (users per hour): additive smoothing.

    Ties are broken by the newest publication, then by the smaller index.

        score_i = (prior_i + recent_i) / sum_j (prior_j + recent_j)
        prior_i = events_i * min(1, 50 / max_j events_j)        of training events

    An item without training events thus leads an old data set after 50 users within an hour, and an item with half the
    events of the most used item after 25.
    """
    columns, num_named = items.columns, items.num_named
    num_events = columns.numbers["popularity"].numbers[:num_named]
    scores = num_events * min(1.0, _PRIOR_EVENTS / max(1.0, float(num_events.max(initial=0.0))))
    for item_id, weight in recent:
        index = items.index(item_id)
        if index is not None and index < len(scores):
            scores[index] += max(0.0, weight)
    total = float(scores.sum())
    if total > 0:
        scores /= total
    published = columns.numbers.get("published_ms")
    if published is None:
        order = np.argsort(-scores, kind="stable")
    else:
        order = np.lexsort((-np.nan_to_num(published.numbers[:num_named]), -scores))
    return PopularRanking(version, order, scores[order])
